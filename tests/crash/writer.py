"""A process that commits bases and dies where it is told: python -m crash.writer RUN KEEP FIRST LAST POINT.

The bases FIRST..LAST are committed in a new term that continues the newest one; the crash point is
armed for the last commit only ("claim:POINT" arms it before the term is claimed). The state of a
step follows from its number, so a reader knows every byte that must come back.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from states import random_states

from everystep.core.census import Atom, Census, Mode, OptimizerSpec
from everystep.core.retention import Rules
from everystep.core.tensors import TensorRef
from everystep.format.base import SessionValues
from everystep.store.runs import identify, read_lineage
from everystep.store.snapshot import Snapshot
from everystep.store.term import TermWriter

SIZES = (4096, 64, 1000)
_ATOMS = tuple(Atom(f"layer.{i}", "uint8", (size,)) for i, size in enumerate(SIZES))
_OPTIMIZER = OptimizerSpec("", "torch.optim.adamw:AdamW", Mode.REPLAY, ((0, 1, 2),))
CENSUS = Census(_ATOMS, (_OPTIMIZER,), "exact")


def content(atom: int, slot: str, version: int, size: int) -> bytes:
    """Bytes that no other atom, slot or version has."""
    return hashlib.shake_128(f"{atom}/{slot}/{version}".encode()).digest(size)


def version_of(atom: int, step: int) -> int:
    """The first atom never changes, so later bases refer to the files of the first."""
    return 0 if atom == 0 else step


def snapshot(step: int) -> Snapshot:
    tensors = []
    for atom, size in enumerate(SIZES):
        for slot in ("", "/exp_avg", "/exp_avg_sq"):
            version = version_of(atom, step)
            data = memoryview(content(atom, slot, version, size))
            tensors.append(TensorRef(atom, slot, "uint8", (size,), version, data))
    session = SessionValues(step, random_states(step), b"", (b"",), ())
    return Snapshot(step, CENSUS, tensors, session, b"", 0)


def continue_run(run: Path, keep_last: int) -> TermWriter:
    known = run.is_dir() and identify(run)[0] is not None
    newest = read_lineage(run).candidates if known else []
    return TermWriter(run, newest[0].point if newest else None, Rules(keep_last))


def main() -> None:
    run, keep_last, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    where, _, point = sys.argv[5].rpartition(":")
    if where == "claim":
        os.environ["EVERYSTEP_CRASH_AT"] = point
    writer = continue_run(run, keep_last)
    for step in range(first, last + 1):
        if step == last and not where:
            os.environ["EVERYSTEP_CRASH_AT"] = point
        writer.commit(snapshot(step))
        print(step, flush=True)  # this step was acknowledged: it may never be lost again
        writer.apply_retention()


if __name__ == "__main__":
    main()
