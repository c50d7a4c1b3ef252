"""What the disk of a run takes: one small write with its sync, and a longer one."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from everystep.store.files import TEMPORARY_PREFIX, RunPath
from everystep.store.stream import BUFFER_BYTES, DEPTH, StreamWriter

_SYNCS = 5
_BLOCK_BYTES = 4096
_WRITE_BYTES = 128 << 20


class Disk(NamedTuple):
    sync_seconds: float
    write_bytes_per_second: float


def measure_disk(run: Path) -> Disk:
    """Writes less than 200 MiB beside the run's epochs, and removes them again."""
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY_PREFIX}probe-", dir=run) as folder:
        place = RunPath(Path(folder))
        return Disk(_sync_seconds(place / "sync"), _rate(place / "rate"))


def _sync_seconds(path: RunPath) -> float:
    seconds = []
    writer = StreamWriter(path, buffer_bytes=_BLOCK_BYTES)
    try:
        for _ in range(_SYNCS):
            began = time.perf_counter()
            writer.append(memoryview(bytes(_BLOCK_BYTES)))
            writer.drain()
            writer.sync()
            seconds.append(time.perf_counter() - began)
    finally:
        writer.close()
    return statistics.median(seconds)


def _rate(path: RunPath) -> float:
    """Of what follows the first lap through the buffers: that one makes their memory real."""
    data = memoryview(os.urandom(1 << 20))
    writer = StreamWriter(path)
    try:
        _append(writer, data, BUFFER_BYTES * DEPTH)
        writer.drain()
        writer.sync()
        began = time.perf_counter()
        _append(writer, data, _WRITE_BYTES)
        writer.finish()
        return _WRITE_BYTES / (time.perf_counter() - began)
    finally:
        writer.close()


def _append(writer: StreamWriter, data: memoryview, size: int) -> None:
    for _ in range(size // len(data)):
        writer.append(data)
