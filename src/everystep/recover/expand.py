"""Packed payloads of a log, made whole where they are needed: on the host, or on the one device that all
tensors lie on, so that only words that are not zero travel there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from everystep.core.census import Census
from everystep.core.events import Event, Planes, Sparse, used_ranges
from everystep.format.planes import unpack_planes
from everystep.format.sparse import Ranges, block_starts, checked, expand
from everystep.lane.memory import COPY_THREADS
from everystep.replay.tensors import Payload

_PLACE_MASK = 0xFFFF


class Expander:
    def __init__(self, census: Census, tensors: Sequence[torch.Tensor]) -> None:
        self._census = census
        devices = {tensor.device for tensor in tensors}
        cuda = len(devices) == 1 and next(iter(devices)).type == "cuda"
        self._device = devices.pop() if cuda else None

    def payload(self, events: list[Event], stored: memoryview) -> Payload:
        """What the events' places speak of."""
        first = events[0] if events else None
        if isinstance(first, Planes):
            return unpack_planes(first, stored, COPY_THREADS)
        if not isinstance(first, Sparse):
            return stored
        ranges = used_ranges(events, self._census)
        if self._device is None:
            return expand(first, stored, ranges)
        return self._on_device(first, stored, ranges, self._device)

    def _on_device(
        self, sparse: Sparse, stored: memoryview, ranges: Ranges, device: torch.device
    ) -> torch.Tensor:
        words = checked(sparse, stored, ranges)
        size = -(-sparse.bytes // 4)
        full = torch.zeros(size, dtype=torch.int32, device=device)
        starts = torch.from_numpy(block_starts(ranges)).to(device)
        counts = torch.from_numpy(words.counts.astype(np.int64)).to(device)
        places = torch.from_numpy(words.places.view(np.int16)).to(device).long() & _PLACE_MASK
        places += torch.repeat_interleave(starts, counts, output_size=sparse.words)
        full[places] = torch.from_numpy(words.values.view(np.int32)).to(device)
        return full.view(torch.uint8)[: sparse.bytes]
