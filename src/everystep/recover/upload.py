"""Copies into live tensors: at once on the CPU, through page-locked staging to GPUs.

The memory of a shadow or a file is not page-locked, and locking all of it would take longer than the
copy. Several threads fill small locked buffers while the ones before are on their way to the device.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import torch

from everystep.device.pages import lock_pages, unlock_pages
from everystep.lane.memory import fresh

_BUFFER_BYTES = 8 << 20  # locking memory is slow, so there is little of it
_BUFFERS = 12


class _Move(NamedTuple):
    at: int
    source: torch.Tensor
    start: int
    size: int


class _Filling(NamedTuple):
    """A buffer that a thread fills, and where its bytes go."""

    buffer: _Buffer
    filled: Future[None]
    targets: list[tuple[torch.Tensor, int, int]]  # target bytes, and where they lie in the buffer


class _Buffer:
    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.bytes = memory
        self.sent = torch.cuda.Event() if device.type == "cuda" else None


class Staging:
    """The way to one device. Used by one thread; others fill buffers for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.frombuffer(fresh(_BUFFERS * _BUFFER_BYTES), dtype=torch.uint8)
        if device.type == "cuda":
            lock_pages(self._memory)
        buffers = self._memory.split(_BUFFER_BYTES)
        self._free = deque(_Buffer(memory, device) for memory in buffers)
        self._filling: deque[_Filling] = deque()
        threads = min(_BUFFERS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, "everystep-upload")
        self._moves: list[_Move] = []  # what the current buffer will be filled with
        self._targets: list[tuple[torch.Tensor, int, int]] = []
        self._used = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Both contiguous, of one type. The source is kept until its bytes are in a buffer."""
        there, size = target.view(-1).view(torch.uint8), source.nbytes
        start = 0
        while start < size:
            part = min(size - start, _BUFFER_BYTES - self._used)
            self._moves.append(_Move(self._used, source, start, part))
            self._targets.append((there[start : start + part], self._used, part))
            self._used += part
            start += part
            if self._used == _BUFFER_BYTES:
                self._fill()

    def finish(self) -> None:
        """Return when everything is where it belongs."""
        if self._used:
            self._fill()
        while self._filling:
            self._send_oldest()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            unlock_pages(self._memory)
        self._pool.shutdown()

    def _fill(self) -> None:
        if not self._free:
            self._send_oldest()
        buffer = self._free.popleft()
        if buffer.sent is not None:
            buffer.sent.synchronize()  # its last bytes have left
        filled = self._pool.submit(_move_all, buffer.bytes.data_ptr(), self._moves)
        self._filling.append(_Filling(buffer, filled, self._targets))
        self._moves, self._targets, self._used = [], [], 0

    def _send_oldest(self) -> None:
        buffer, filled, targets = self._filling.popleft()
        filled.result()
        for target, at, size in targets:
            target.copy_(buffer.bytes[at : at + size], non_blocking=True)
        if buffer.sent is not None:
            buffer.sent.record(torch.cuda.current_stream(self._device))
        self._free.append(buffer)


def _move_all(base: int, moves: list[_Move]) -> None:
    while moves:
        at, source, start, size = moves.pop()
        ctypes.memmove(base + at, source.data_ptr() + start, size)  # without Python's lock


class Uploads:
    """`with Uploads() as uploads: uploads.copy(live, stored)`."""

    def __init__(self) -> None:
        self._ways: dict[torch.device, Staging] = {}

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        alike = target.is_contiguous() and (target.dtype, target.shape) == (
            source.dtype,
            source.shape,
        )
        if target.device.type != "cuda" or not alike:
            target.copy_(source)
            return
        if target.device not in self._ways:
            self._ways[target.device] = Staging(target.device)
        self._ways[target.device].copy(target, source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for way in self._ways.values():
            way.finish()
