"""Packed payloads of a log, made whole where they are needed: on the host, or on the one device that all
tensors lie on, so that only words that are not zero travel there, and while the entry before is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Self

import torch

from everystep.core.census import Census
from everystep.core.events import Event, Planes, Sparse, used_ranges
from everystep.format.planes import unpack_planes
from everystep.format.sparse import Ranges, block_starts, checked, expand, part_ends
from everystep.lane.memory import COPY_THREADS
from everystep.recover.upload import Staging
from everystep.replay.tensors import Payload

_PLACE_MASK = 0xFFFF


class Expander:
    """`with Expander(...) as expander`: a way to the device is open meanwhile."""

    def __init__(self, census: Census, tensors: Sequence[torch.Tensor]) -> None:
        self._census = census
        devices = {tensor.device for tensor in tensors}
        cuda = len(devices) == 1 and next(iter(devices)).type == "cuda"
        self._device = devices.pop() if cuda else None
        self._staging: Staging | None = None

    def payloads(
        self, entries: Iterable[tuple[list[Event], memoryview]]
    ) -> Iterator[tuple[list[Event], Payload]]:
        """Every entry's events and what their places speak of; one entry is begun ahead."""
        begun: tuple[list[Event], Callable[[], Payload]] | None = None
        for events, stored in entries:
            before, begun = begun, (events, self._begin(events, stored))
            if before:
                yield before[0], before[1]()
        if begun:
            yield begun[0], begun[1]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._staging is not None:
            self._staging.finish()

    def _begin(self, events: list[Event], stored: memoryview) -> Callable[[], Payload]:
        first = events[0] if events else None
        if isinstance(first, Planes):
            return partial(unpack_planes, first, stored, COPY_THREADS)
        if not isinstance(first, Sparse):
            return lambda: stored
        ranges = used_ranges(events, self._census)
        if self._device is None:
            return partial(expand, first, stored, ranges)
        return self._send(first, stored, ranges, self._device)

    def _send(
        self, sparse: Sparse, stored: memoryview, ranges: Ranges, device: torch.device
    ) -> Callable[[], torch.Tensor]:
        checked(sparse, stored, ranges)
        if not sparse.words:
            return partial(torch.zeros, sparse.bytes, dtype=torch.uint8, device=device)
        self._staging = self._staging or Staging(device)
        there = []
        for data in (
            torch.frombuffer(stored, dtype=torch.uint8),
            torch.from_numpy(block_starts(ranges)),
        ):
            there.append(torch.empty_like(data, device=device))
            self._staging.copy(there[-1], data)
        sent = self._staging.flush()

        def whole() -> torch.Tensor:
            sent.result()  # from now on the copies are queued before whatever comes
            return expand_on_device(sparse, *there)

        return whole


def expand_on_device(sparse: Sparse, stored: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """What `format.sparse.expand` does, on a device and without waiting for it."""
    middle, end = part_ends(sparse)
    counts = stored[:middle].view(torch.int32)
    places = stored[middle:end].view(torch.int16)[: sparse.words].long() & _PLACE_MASK
    places += torch.repeat_interleave(starts, counts, output_size=sparse.words)
    full = torch.zeros(-(-sparse.bytes // 4), dtype=torch.int32, device=stored.device)
    full[places] = stored[end:].view(torch.int32)
    return full.view(torch.uint8)[: sparse.bytes]
