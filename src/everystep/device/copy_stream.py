"""A device's side stream, as the copier sees it. Only here is CUDA spoken.

Copies are queued behind the work that made the data; the host never waits for them. Where memory must
not change before a copy is done, the *compute stream* waits on the device, and that wait is measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch

from everystep.core.pace import smoothed
from everystep.device.batch import BatchedCopy, batched_copy
from everystep.device.pages import lock_pages, unlock_pages

STAGING_BYTES = 16 << 20
_RATE_BYTES_MIN = 1 << 20  # smaller copies say nothing about the link
_nbytes = attrgetter("nbytes")
_is_contiguous = torch.Tensor.is_contiguous

Tensors = Sequence[torch.Tensor]


class CopyStream(Protocol):
    """What a copier needs of a device. Marks are places in the side stream."""

    stall_seconds: float  # time the compute stream has waited for us
    link_bytes_per_second: float  # 0: not measured yet
    window_seconds: float  # from one step to the next; 0: not measured yet
    digest_seconds: float  # that digesting the state took last; 0: not measured yet

    @property
    def is_idle(self) -> bool:
        """Whether the compute stream has done everything it was given."""

    @property
    def allocated_bytes(self) -> int:
        """Device memory in use by this process's tensors now."""

    @property
    def peak_bytes(self) -> int:
        """The most that was ever in use."""

    def follow(self) -> None:
        """Queue what comes next behind everything the compute stream has been given so far."""

    @property
    def packing_pays(self) -> bool:
        """Whether many small copies are better made one: packed on the device first."""

    def staging(self) -> torch.Tensor:
        """STAGING_BYTES of device memory for packing; used in the order of the side stream."""

    def pack(self, targets: Tensors, sources: Tensors) -> None:
        """Copies that stay on the device, all in one call."""

    def offload(self, targets: Tensors, sources: Tensors) -> None:
        """Copies into host memory, all in one call."""

    def host_like(self, value: torch.Tensor) -> torch.Tensor:
        """Host memory that a small tensor can be offloaded to without waiting."""

    def mark(self) -> Any:
        """The place the side stream has been filled up to."""

    def wait_for(self, mark: Any) -> None:
        """Queue what comes next behind a mark of another device's side stream."""

    def passed(self, mark: Any) -> bool:
        """Whether everything before the mark is done, as far as the host can know."""

    def wait_for_copy(self, mark: Any) -> None:
        """Let the compute stream wait for the mark."""

    def open_window(self) -> None:
        """A step is queued: the time until the next one begins."""

    def close_window(self) -> None:
        """The next step is about to be queued."""

    def digest(self, work: Callable[[], None]) -> None:
        """Do work that is queued on the compute stream, and measure it there."""

    def write_word(self, target: torch.Tensor, word: int) -> None:
        """Put 64 bits into host memory, behind every copy queued so far."""

    def close(self) -> None:
        """Wait until nothing is queued any more."""


class CudaCopyStream:
    """Owned by the training thread."""

    def __init__(self, device: torch.device, *, page_locked: bool) -> None:
        self._device = device
        self._asynchronous = page_locked
        self._stream = torch.cuda.Stream(device)
        # by number: torch takes ten times as long to look a device up by its name
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._compute = partial(torch.cuda.current_stream, index)
        self._word = torch.empty(1, dtype=torch.int64, device=device)
        self._staging: torch.Tensor | None = None
        self._batch: BatchedCopy | None = batched_copy(device) if page_locked else None
        self._lists = _copies_lists(device)
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._copies: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self.stall_seconds = 0.0
        self.link_bytes_per_second = 0.0
        self._window: torch.cuda.Event | None = None
        self._windows: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.window_seconds = 0.0
        self._digest: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.digest_seconds = 0.0

    @property
    def is_idle(self) -> bool:
        return bool(self._compute().query())

    @property
    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def follow(self) -> None:
        self._stream.wait_stream(self._compute())
        self._harvest()

    @property
    def packing_pays(self) -> bool:
        return self._batch is None

    def staging(self) -> torch.Tensor:
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=self._device)
            self._stream.wait_stream(self._compute())
        return self._staging

    def pack(self, targets: Tensors, sources: Tensors) -> None:
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources))

    def offload(self, targets: Tensors, sources: Tensors) -> None:
        size = sum(map(_nbytes, targets))
        timed = size >= _RATE_BYTES_MIN and not self._copies  # one copy at a time tells enough
        began = self._timed_mark(self._stream) if timed else None
        if self._batch is not None and all(map(_is_contiguous, sources)):
            self._batch(targets, sources, self._stream)
        else:
            self._offload_through_torch(targets, sources)
        if began is not None:
            self._copies.append((began, self._timed_mark(self._stream), size))

    def _offload_through_torch(self, targets: Tensors, sources: Tensors) -> None:
        with torch.cuda.stream(self._stream):
            if self._lists:
                torch._foreach_copy_(list(targets), list(sources), non_blocking=self._asynchronous)
                return
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=self._asynchronous)

    def host_like(self, value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait_for(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def wait_for_copy(self, mark: torch.cuda.Event) -> None:
        if mark.query():
            return
        compute = self._compute()
        before = self._timed_mark(compute)
        compute.wait_event(mark)
        self._waits.append((before, self._timed_mark(compute)))

    def open_window(self) -> None:
        self._window = self._timed_mark(self._compute())

    def close_window(self) -> None:
        if self._window is not None:
            now = self._timed_mark(self._compute())
            self._windows.append((self._window, now))
            self._window = None

    def digest(self, work: Callable[[], None]) -> None:
        before = self._timed_mark(self._compute())
        work()
        self._digest = before, self._timed_mark(self._compute())

    def write_word(self, target: torch.Tensor, word: int) -> None:
        signed = word - (1 << 64) if word >> 63 else word
        with torch.cuda.stream(self._stream):
            self._word.fill_(signed)
            target.view(torch.int64).copy_(self._word, non_blocking=self._asynchronous)

    def close(self) -> None:
        self._stream.synchronize()
        self._harvest()

    @staticmethod
    def _timed_mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def _harvest(self) -> None:
        """Take in what was measured, without waiting for what is still under way."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self.stall_seconds += before.elapsed_time(after) / 1e3
        while self._copies and self._copies[0][1].query():
            before, after, size = self._copies.popleft()
            rate = size / max(before.elapsed_time(after) / 1e3, 1e-9)
            self.link_bytes_per_second = smoothed(self.link_bytes_per_second, rate)
        while self._windows and self._windows[0][1].query():
            before, after = self._windows.popleft()
            seconds = before.elapsed_time(after) / 1e3
            self.window_seconds = smoothed(self.window_seconds, seconds)
        if self._digest is not None and self._digest[1].query():
            before, after = self._digest
            self._digest, self.digest_seconds = None, before.elapsed_time(after) / 1e3


def _copies_lists(device: torch.device) -> bool:
    """Whether this torch copies a list of device tensors to the host in one call."""
    sources = [torch.full((3,), float(i), device=device) for i in range(2)]
    targets = [torch.zeros(3) for _ in sources]
    try:
        torch._foreach_copy_(targets, sources, non_blocking=True)
    except RuntimeError:
        return False
    torch.cuda.synchronize(device)
    return all(torch.equal(t, s.cpu()) for t, s in zip(targets, sources, strict=True))


def open_sides(memory: torch.Tensor, devices: set[torch.device]) -> dict[torch.device, CopyStream]:
    """A side stream for every GPU among the devices; `memory` is page-locked for them."""
    cuda = [device for device in devices if device.type == "cuda"]
    if not cuda:
        return {}
    locked = lock_pages(memory)
    return {device: CudaCopyStream(device, page_locked=locked) for device in cuda}


def close_sides(memory: torch.Tensor, sides: dict[torch.device, CopyStream]) -> None:
    for side in sides.values():
        side.close()
    unlock_pages(memory)
