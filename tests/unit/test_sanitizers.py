"""That `make test-sanitize` would find something: the library is the sanitized one, and both kinds of fault
end the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SANITIZED = os.environ.get("EVERYSTEP_NATIVE", "").endswith(".so")
BEGIN = "import numpy as np; from everystep import native; from everystep.native import digests; "


@pytest.mark.skipif(not SANITIZED, reason="make test-sanitize runs it")
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            "a, b = np.zeros(1000, np.uint8), np.zeros(2000, np.uint8); "
            "native.copy([(a.ctypes.data, b.ctypes.data, 1001)], 1)",
            "heap-buffer-overflow",
        ),
        (
            "a, sums = np.zeros(1000, np.uint8), np.zeros(1, np.int64); "
            "digests.add_digests([digests.Run(a.ctypes.data + 1, 200, 4)], sums, 1)",
            "misaligned address",
        ),
    ],
)
def test_a_fault_ends_the_process(fault: str, told: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + fault], capture_output=True, text=True)
    assert done.returncode != 0 and told in done.stderr, done.stderr
