"""Damage to a log that was written whole."""

from __future__ import annotations

import struct
from pathlib import Path

import ondisk

from everystep.format.log import read_heads
from everystep.store.disk.mapped import map_file

_FRAME = struct.Struct("<QQQ")  # bytes of the events, their checksum, bytes of the payload


def flip(run: Path, step: int, part: str) -> None:
    """One bit of the record of this step: of its first entry's frame, events or gradients."""
    records = [
        (path, head)
        for path in ondisk.segments(run, 1)
        for head in read_heads(map_file(ondisk.place(path)), str(path))
        if head.step == step
    ]
    ((path, head),) = records
    data = bytearray(path.read_bytes())
    events, _, payload = _FRAME.unpack_from(data, head.start)
    assert payload, "the first entry has no gradients"
    behind = _FRAME.size + events
    place = {"frame": 0, "events": behind - events // 2 - 1, "gradients": behind + payload // 2}
    data[head.start + place[part]] ^= 4
    path.write_bytes(data)
