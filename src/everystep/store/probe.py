"""What the disk of a run takes: one small write with its sync, and a longer one."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from everystep.store.layout import TEMPORARY_PREFIX
from everystep.store.stream import StreamWriter

_SYNCS = 5
_BLOCK_BYTES = 4096
_WRITE_BYTES = 64 << 20


class Disk(NamedTuple):
    sync_seconds: float
    write_bytes_per_second: float


def measure_disk(run: Path) -> Disk:
    """Writes 64 MiB beside the run's epochs, and removes them again."""
    with tempfile.TemporaryDirectory(prefix=f"{TEMPORARY_PREFIX}probe-", dir=run) as folder:
        return Disk(_sync_seconds(Path(folder) / "sync"), _rate(Path(folder) / "rate"))


def _sync_seconds(path: Path) -> float:
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


def _rate(path: Path) -> float:
    data = memoryview(os.urandom(1 << 20))
    began = time.perf_counter()
    writer = StreamWriter(path)
    try:
        while writer.bytes < _WRITE_BYTES:
            writer.append(data)
        writer.finish()
    finally:
        writer.close()
    return _WRITE_BYTES / (time.perf_counter() - began)
