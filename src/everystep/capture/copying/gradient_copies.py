"""Gradients into the ring: small ones packed on the device, large ones directly, in a few parts.

They are held until their copies are done; on the CPU they are copied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch

from everystep.capture.copying.in_flight import InFlightBuffers
from everystep.core.census import PACKED_BYTES_MAX, GradientLayout, align
from everystep.device.copy_stream import STAGING_BYTES, CopyStream

_PART_BYTES = 128 << 20  # gradients are freed in parts of about this size
_PARTS_MAX = 8

Gradients = Sequence[torch.Tensor | None]
Pick = Callable[[Sequence[Any]], tuple[Any, ...]]  # some members of a sequence


class _Pack(NamedTuple):
    """Small gradients that one copy moves: where they lie in the payload, and in the staging."""

    pick: Pick
    start: int
    staged: torch.Tensor
    views: tuple[torch.Tensor, ...]


@dataclass
class _Route:
    """How one optimizer's gradients travel."""

    side: CopyStream | None
    packs: list[_Pack]
    parts: list[Pick]


class GradientCopies:
    """Owned by the training thread."""

    def __init__(
        self, memory: torch.Tensor, sides: dict[torch.device, CopyStream], holds: InFlightBuffers
    ) -> None:
        self._bytes = memory
        self._sides = sides
        self._holds = holds
        self._views: dict[tuple[int, int], list[Any]] = {}
        self._routes: dict[int, list[_Route]] = {}

    def send(self, at: int, optimizer: int, layout: GradientLayout, gradients: Gradients) -> None:
        """Copy the gradients that are there to `at` plus their offsets; those of GPUs are held.
        Each has the type and shape that its place was laid out for."""
        views = self._slot_views(at, optimizer, layout, enumerate(gradients))
        with torch.no_grad():
            gradients = _resolved(gradients) if self._sides else gradients
            for route in self._routes_of(optimizer, layout, gradients):
                self._send_along(route, at, views, gradients)

    def send_some(
        self, at: int, optimizer: int, layout: GradientLayout, gradients: dict[int, torch.Tensor]
    ) -> None:
        """Copy large gradients ahead of the others, by their place in the optimizer's order."""
        views = self._slot_views(at, optimizer, layout, gradients.items())
        with torch.no_grad():
            for device in _devices(list(gradients.values())):
                side = self._sides[device]
                own = [i for i, g in gradients.items() if g.device == device]
                sources = _resolved([gradients[i] for i in own])
                side.follow()
                side.offload([views[i] for i in own], sources)
                self._holds.add(side, sources)

    def read_later(self, value: torch.Tensor) -> tuple[torch.Tensor, CopyStream, Any]:
        """Bring a small device tensor to the host; it may be looked at once its mark has passed."""
        side = self._sides[value.device]
        target = side.host_like(value)
        side.follow()
        side.offload([target], [value])
        return target, side, self._holds.add(side, [value])

    def _routes_of(
        self, optimizer: int, layout: GradientLayout, gradients: Gradients
    ) -> list[_Route]:
        if optimizer in self._routes:
            return self._routes[optimizer]
        if any(g is None for g in gradients):  # lay routes out when all have been seen
            return [self._plain_route(device, gradients) for device in _devices(gradients)]
        self._routes[optimizer] = self._lay_out(layout, gradients)
        return self._routes[optimizer]

    def _send_along(self, route: _Route, at: int, views: Gradients, gradients: Gradients) -> None:
        if route.side is None:
            for pick in route.parts:
                targets, sources = _there(pick(views), pick(gradients))
                if sources:
                    torch._foreach_copy_(list(targets), list(sources))
            return
        side = route.side
        side.follow()
        for pack in route.packs:
            targets, sources = _there(pack.views, pack.pick(gradients))
            if sources:
                side.pack(targets, sources)
                start = at + pack.start
                side.offload([self._bytes[start : start + pack.staged.nbytes]], [pack.staged])
                self._holds.add(side, sources)
        for pick in route.parts:
            targets, sources = _there(pick(views), pick(gradients))
            if sources:
                side.offload(targets, sources)
                self._holds.add(side, sources)

    def _lay_out(self, layout: GradientLayout, gradients: Gradients) -> list[_Route]:
        """Small gradients together through the staging, large ones directly, in a few parts."""
        devices = _devices(gradients)
        side = self._sides.get(devices[0]) if len(devices) == 1 else None
        if side is None:
            return [self._plain_route(device, gradients) for device in devices]
        order = sorted(range(len(gradients)), key=lambda i: layout.offsets[i])
        sizes = [align(g.nbytes) if g is not None else 0 for g in gradients]
        limit = PACKED_BYTES_MAX if side.packing_pays else -1
        small = [i for i in order if sizes[i] <= limit]
        large = [i for i in order if sizes[i] > limit]
        packs = [
            self._pack(side, members, layout, gradients)
            for members in _cut(small, sizes, STAGING_BYTES - PACKED_BYTES_MAX)
        ]
        part_bytes = max(_PART_BYTES, -(-sum(sizes) // _PARTS_MAX))
        parts = [_picker(members) for members in _cut(large, sizes, part_bytes)]
        return [_Route(side, packs, parts)]

    def _pack(
        self, side: CopyStream, members: list[int], layout: GradientLayout, gradients: Gradients
    ) -> _Pack:
        start = layout.offsets[members[0]]
        views, end = [], start
        for member in members:
            gradient = gradients[member]
            assert gradient is not None
            at = layout.offsets[member] - start
            end = layout.offsets[member] + gradient.nbytes
            views.append(_typed(side.staging(), at, gradient))
        return _Pack(_picker(members), start, side.staging()[: end - start], tuple(views))

    def _plain_route(self, device: torch.device, gradients: Gradients) -> _Route:
        members = [i for i, g in enumerate(gradients) if g is not None and g.device == device]
        return _Route(self._sides.get(device), [], [_picker(members)])

    def _slot_views(
        self,
        at: int,
        optimizer: int,
        layout: GradientLayout,
        gradients: Iterable[tuple[int, torch.Tensor | None]],
    ) -> list[Any]:
        # a slot is used again and again with the same layout: typed views of it are kept
        views = self._views.setdefault((at, optimizer), [None] * len(layout.offsets))
        if any(map(is_, views, repeat(None))):  # gradients that were never there
            for i, gradient in gradients:
                if views[i] is None and gradient is not None:
                    views[i] = _typed(self._bytes, at + layout.offsets[i], gradient)
        return views


def _resolved(gradients: Sequence[Any]) -> Sequence[Any]:
    """Lazy conjugates and negatives computed: copies of memory know nothing of what is still to be done."""
    there = [g for g in gradients if g is not None]
    if not any(map(torch.Tensor.is_conj, there)) and not any(map(torch.Tensor.is_neg, there)):
        return gradients
    return [g if g is None else g.resolve_conj().resolve_neg() for g in gradients]


def _devices(gradients: Gradients) -> list[torch.device]:
    return list(dict.fromkeys(g.device for g in gradients if g is not None))


def _picker(members: list[int]) -> Pick:
    if len(members) > 1:
        return itemgetter(*members)
    return lambda sequence: tuple(sequence[member] for member in members)


def _there(targets: Sequence[Any], sources: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Without the gradients that are not there."""
    if not any(map(is_, sources, repeat(None))):
        return targets, sources
    present = [i for i, source in enumerate(sources) if source is not None]
    return [targets[i] for i in present], [sources[i] for i in present]


def _cut(members: list[int], sizes: list[int], limit: int) -> list[list[int]]:
    """Runs of members of about `limit` bytes each."""
    runs: list[list[int]] = []
    filled = limit
    for member in members:
        if filled >= limit:
            runs.append([])
            filled = 0
        runs[-1].append(member)
        filled += sizes[member]
    return runs


def _typed(memory: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    return memory[at : at + like.nbytes].view(like.dtype).view(like.shape)
