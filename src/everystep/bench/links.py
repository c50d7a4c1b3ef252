"""`everystep bench copy`: what this machine's links and disk can do. All rates in bytes per second."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from everystep.device.copy_stream import close_sides, open_sides
from everystep.lane.arena import SharedMemory
from everystep.store.disk.files import RunPath
from everystep.store.disk.stream import StreamWriter

_SECONDS = 0.3  # of copying for one figure
_PIECES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "256 MiB": 256 << 20}
_DISK_PIECES = {"4 MiB": 4 << 20, "16 MiB": 16 << 20, "32 MiB": 32 << 20}
_READERS = 4
_READ_BYTES = 8 << 20


def links(folder: Path | None, disk_bytes: int) -> dict[str, Any]:
    """Every link that there is."""
    document: dict[str, Any] = {"memory": _memory(), "disk": disk(folder, disk_bytes)}
    if torch.cuda.is_available():
        document["gpu"] = torch.cuda.get_device_name()
        document |= _gpu()
    return document


def _memory() -> dict[str, float]:
    source, target = (torch.empty(256 << 20, dtype=torch.uint8).fill_(1) for _ in range(2))
    return {"copy": _rate(lambda: target.copy_(source), source.nbytes)}


def _gpu() -> dict[str, Any]:
    """Device to shared memory as the tap uses it, back again as recovery does, and on the device."""
    device = torch.device("cuda", torch.cuda.current_device())
    largest = max(_PIECES.values())
    memory = SharedMemory.create(largest, "bench")
    host = torch.frombuffer(memory.map, dtype=torch.uint8)
    began = time.perf_counter()
    sides = open_sides(host, {device})
    registering = largest / (time.perf_counter() - began)
    on_device = torch.empty(largest, dtype=torch.uint8, device=device)
    other = torch.empty_like(on_device)
    try:
        down, up = {}, {}
        for name, size in _PIECES.items():
            here, there = host[:size], on_device[:size]
            down[name] = _rate(partial(here.copy_, there, non_blocking=True), size, sync=True)
            up[name] = _rate(partial(there.copy_, here, non_blocking=True), size, sync=True)
        return {
            "device_to_shared_memory": down,
            "shared_memory_to_device": up,
            "device_to_device": _rate(lambda: other.copy_(on_device), 2 * largest, sync=True),
            "registering": registering,
        }
    finally:
        close_sides(host, sides)
        memory.close()


def upload_rate() -> float:
    """From page-locked memory to the device, in large pieces."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    return _rate(lambda: target.copy_(source, non_blocking=True), source.nbytes, sync=True)


def disk(folder: Path | None, size: int) -> dict[str, Any]:
    """Direct writes of several sizes, the sync included; then several threads read one of them."""
    parent = str(folder) if folder else None
    data = memoryview(os.urandom(1 << 20) * 32)
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="everystep-bench-", dir=parent) as place:
        for name, piece in _DISK_PIECES.items():
            path = RunPath(Path(place)) / name.replace(" ", "")
            began = time.perf_counter()
            writer = StreamWriter(path, buffer_bytes=piece)
            while writer.bytes < size:
                writer.append(data[: size - writer.bytes])
            writer.finish()
            rates[name] = size / (time.perf_counter() - began)
            direct = writer.direct
            writer.close()
        read = _read_rate(path, direct=direct)
    return {**rates, "direct": direct, "best": max(rates.values()), "read": read}


def _read_rate(path: RunPath, *, direct: bool) -> float:
    """Past the page cache, as a restarted host has to read."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    size = os.fstat(fd).st_size
    pieces = iter(range(0, size, _READ_BYTES))

    def read() -> None:
        buffer = mmap.mmap(-1, _READ_BYTES)
        for at in pieces:
            os.preadv(fd, [buffer], at)

    began = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as readers:
        for done in [readers.submit(read) for _ in range(_READERS)]:
            done.result()
    os.close(fd)
    return size / (time.perf_counter() - began)


def _rate(work: Callable[[], object], size: int, *, sync: bool = False) -> float:
    work()
    if sync:
        torch.cuda.synchronize()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        for _ in range(max(1, (64 << 20) // size)):
            work()
            count += 1
        if sync:
            torch.cuda.synchronize()
    return size * count / (time.perf_counter() - began)
