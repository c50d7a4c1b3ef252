"""Lives on failing disks from fixed seeds; `make faults` lives many. And what would be found if a sync were
forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.crash import Forgets, live

ROOT = Path(__file__).resolve().parents[2]
LIVES = os.environ.get("EVERYSTEP_FAULTS", "30")


def test_no_promise_is_broken() -> None:
    words = [sys.executable, "-m", "tests.faults", "--n", LIVES, "--seed", "1"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize(
    "forgets",
    [
        pytest.param(lambda operation, folder: folder, id="of folders"),
        pytest.param(lambda operation, folder: not folder, id="of files"),
        pytest.param(lambda operation, folder: operation.node == 0, id="of the folder above"),
    ],
)
def test_a_sync_that_is_forgotten_is_found(forgets: Forgets) -> None:
    """Or the simulator would show nothing."""
    assert any(problem for seed in range(20) for problem in live(seed, forgets))
