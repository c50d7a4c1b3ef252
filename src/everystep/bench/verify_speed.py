"""How fast a healthy store is verified, by the command that users run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from everystep.capture.rng import capture_rng
from everystep.core.census import Atom, Census
from everystep.core.retention import Rules
from everystep.core.tensors import TensorRef
from everystep.errors import EverystepError
from everystep.format.base import SessionValues
from everystep.store.snapshot import Snapshot
from everystep.store.term import TermWriter

_ATOMS = 16


def verify_speed(size: int) -> dict[str, Any]:
    """Write a store of `size` bytes, then run `everystep verify` on it in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="everystep-bench-") as folder:
        run = Path(folder) / "run"
        TermWriter(run, None, Rules(1)).commit(_snapshot(size))
        command = [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "everystep",
            "verify",
            str(run),
            "--json",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise EverystepError(
                f"bench verify: the command failed: {done.stdout or done.stderr[-500:]}"
            )
        document: dict[str, Any] = msgspec.json.decode(done.stdout)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return {
        "bytes": document["bytes"],
        "seconds": document["seconds"],
        "gigabytes_per_second": document["gigabytes_per_second"],
        "imports_torch": "torch" in imported,
    }


def _snapshot(size: int) -> Snapshot:
    elements = size // _ATOMS // 4
    census = Census(
        tuple(Atom(f"layer{i}.weight", "float32", (elements,)) for i in range(_ATOMS)), (), "exact"
    )
    data = memoryview(os.urandom(4 * elements))
    tensors = [TensorRef(i, "", "float32", (elements,), 1, data) for i in range(_ATOMS)]
    return Snapshot(1, census, tensors, SessionValues(1, capture_rng(), b"", (), ()), b"", 0)
