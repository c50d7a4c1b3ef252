"""Damage of the kinds that a look at a run has to see: what is gone, cut off or grown, documents that rot,
and anything in the segment of the log that was written last. Bytes that rot inside of tensors, or in a
segment that was finished long ago, are for `everystep verify`."""

from __future__ import annotations

import random
from pathlib import Path

import ondisk

_READ_WHOLE = (ondisk.BASE, ondisk.INDEX, ondisk.MANIFEST, ondisk.RUN_DOCUMENT, ondisk.SESSION)


def damage(run: Path, chance: random.Random) -> str:
    """Do something to one file; in words."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    newest = newest_segment(run)
    path = newest if newest is not None and chance.random() < 0.4 else chance.choice(files)
    kinds = ["gone", "cut", "grown"]
    if path == newest or path.name in _READ_WHOLE:
        kinds += ["flipped", "zeroed"]
    kind = chance.choice(kinds)
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data)) if data else 0
    if kind == "gone":
        path.unlink()
        return f"{path.relative_to(run)} gone"
    if kind == "cut":
        del data[at:]
    elif kind == "grown":
        data += chance.choice([b"\0", bytes(5000), b"\xa5" * 5000])
    elif kind == "flipped" and data:
        data[at] ^= 1 + chance.randrange(255)
    elif kind == "zeroed":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    path.write_bytes(data)
    return f"{path.relative_to(run)} {kind} at {at}"


def newest_segment(run: Path) -> Path | None:
    segments = [path for n in ondisk.term_numbers(run) for path in ondisk.segments(run, n)[-1:]]
    return segments[0] if segments else None
