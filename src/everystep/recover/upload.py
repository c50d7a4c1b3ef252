"""Copies into live tensors: at once on the CPU, through page-locked staging to GPUs.

The memory of a shadow or a file is not page-locked, and locking all of it would take longer than the
copy. One half of a small locked memory is filled by all cores while the other is on its way to the device;
both are done by a thread, while the caller says what comes next.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Self

import torch

from everystep.device.pages import lock_pages, unlock_pages
from everystep.lane.memory import fresh, move

_HALF_BYTES = 32 << 20  # small, because locking memory is slow


class _Part(NamedTuple):
    """Some bytes of a tensor, and where in a half they lie on their way."""

    target: torch.Tensor
    source: torch.Tensor  # kept until its bytes have left
    start: int
    at: int
    size: int


class _Halves:
    """The staging memory. Owned by the thread that sends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        # memory is at its limit with fewer threads than there are cores
        self._threads = max(1, 3 * len(os.sched_getaffinity(0)) // 4)
        self._memory = torch.frombuffer(fresh(2 * _HALF_BYTES), dtype=torch.uint8)
        if self._cuda:
            lock_pages(self._memory)
        self._halves = self._memory.split(_HALF_BYTES)
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def send(self, parts: list[_Part]) -> None:
        half, sent = self._halves[self._turn], self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # its last bytes have left
        base = half.data_ptr()
        move([(base + p.at, p.source.data_ptr() + p.start, p.size) for p in parts], self._threads)
        for part in parts:
            there = part.target.view(-1).view(torch.uint8)[part.start : part.start + part.size]
            there.copy_(half[part.at : part.at + part.size], non_blocking=True)
        if self._cuda:
            self._sent[self._turn] = torch.cuda.current_stream(self._device).record_event()
        self._turn = 1 - self._turn

    def close(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)
            unlock_pages(self._memory)


class Staging:
    """The way to one device."""

    def __init__(self, device: torch.device) -> None:
        # a thread begins on the first device, in its default stream: what the caller has queued for the
        # targets must come first
        begin: Callable[[], None] | None = None
        if device.type == "cuda":
            begin = partial(torch.cuda.set_stream, torch.cuda.current_stream(device))
        self._sender = ThreadPoolExecutor(1, "everystep-upload", initializer=begin)
        self._halves = self._sender.submit(_Halves, device)
        self._sending: list[Future[None]] = []
        self._parts: list[_Part] = []
        self._used = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Both contiguous, of one type."""
        start, size = 0, source.nbytes
        while start < size:
            part = min(size - start, _HALF_BYTES - self._used)
            self._parts.append(_Part(target, source, start, self._used, part))
            self._used += part
            start += part
            if self._used == _HALF_BYTES:
                self.flush()

    def finish(self) -> None:
        """Return when everything is where it belongs."""
        self.flush()
        self._do(_Halves.close)
        self._sender.shutdown()
        for sent in self._sending:
            sent.result()  # raises what went wrong

    def flush(self) -> Future[None]:
        """Send what there is; when this is done, all copies so far are queued on the device."""
        parts, self._parts, self._used = self._parts, [], 0
        return self._do(lambda halves: halves.send(parts))

    def _do(self, work: Callable[[_Halves], None]) -> Future[None]:
        self._sending.append(self._sender.submit(lambda: work(self._halves.result())))
        return self._sending[-1]


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
