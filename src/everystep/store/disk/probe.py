"""What the disk of a run takes: one small write with its sync, and a longer one."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from everystep.store.disk.files import RunPath, remove_file, temporary_for
from everystep.store.disk.meter import Meter
from everystep.store.disk.stream import BUFFER_BYTES, DEPTH, StreamWriter

_SYNCS = 5
_BLOCK_BYTES = 4096
_WRITE_BYTES = 128 << 20
_SECONDS_MAX = 10.0


class Disk(NamedTuple):
    sync_seconds: float
    write_bytes_per_second: float


def measure_disk(run: Path, meter: Meter | None = None) -> Disk:
    """Writes about 200 MiB beside the run's terms. The files have no name as soon as they are open: nothing
    is left of them, however this process ends."""
    meter, need = meter or Meter(), BUFFER_BYTES * DEPTH + _WRITE_BYTES
    limit = meter.limits.disk_bytes_per_second
    if limit and need > _SECONDS_MAX * limit:  # the limit is what there is: a disk is hardly slower
        return Disk(_sync_seconds(run), float(limit))
    meter.lend(run, need)
    return Disk(_sync_seconds(run), _rate(run))


def _nameless(run: Path, buffer_bytes: int) -> StreamWriter:
    path = temporary_for(RunPath(run) / "probe")
    try:
        return StreamWriter(path, buffer_bytes=buffer_bytes)
    finally:
        remove_file(path)


def _sync_seconds(run: Path) -> float:
    seconds = []
    writer = _nameless(run, _BLOCK_BYTES)
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


def _rate(run: Path) -> float:
    """Of what follows the first lap through the buffers: that one makes their memory real."""
    data = memoryview(os.urandom(1 << 20))
    writer = _nameless(run, BUFFER_BYTES)
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
