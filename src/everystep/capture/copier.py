"""Moves tensor bytes into the ring: at once from the CPU, through side streams from GPUs.

Two kinds of sources need care on a side stream. *Gradients* are kept alive until their copy is done
(`release`). *State* does not change between a seal and the next step, so it is copied meanwhile, and
the slot it lies in is committed only when it is known that nobody changed it (`settle`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from everystep.capture.side import STAGING_BYTES, Side, close_sides, open_sides
from everystep.core.census import PACKED_BYTES_MAX, GradientLayout, align
from everystep.core.schedule import Phase, cut, plan_offload
from everystep.format.slot import SLOT_DEVICE_WORD_AT, commit_word
from everystep.lane.ring import RingWriter

_PART_BYTES = 64 << 20  # gradients are let go in parts of about this size
_PARTS_MAX = 8
_CLONED_BYTES_MAX = 4 << 20
_CUT_BYTES = 16 << 20  # state that does not fit before the next step is divided this finely

Gradients = Sequence[torch.Tensor | None]


class _Hold(NamedTuple):
    side: Side
    mark: Any
    gradients: list[torch.Tensor]


class _Flight(NamedTuple):
    """State on its way. Pieces of tensors that do not lie row by row are copies: they are kept."""

    side: Side
    mark: Any
    pieces: list[_Piece]


class _Piece(NamedTuple):
    target: torch.Tensor
    source: torch.Tensor
    stays: bool  # the source does not change before the next step

    def part(self, start: int, size: int) -> _Piece:
        end = start + size
        return _Piece(self.target[start:end], self.source[start:end], self.stays)


class _Pack(NamedTuple):
    """Small gradients that one copy moves: where they lie in the payload, and in the staging."""

    members: list[int]
    start: int
    bytes: int
    views: list[torch.Tensor]


@dataclass
class _Route:
    """How one optimizer's gradients travel."""

    side: Side | None
    packs: list[_Pack]
    parts: list[list[int]]


class Copier:
    """Owned by the training thread."""

    def __init__(self, ring: RingWriter, devices: set[torch.device]) -> None:
        self._ring = ring
        self._bytes = torch.frombuffer(ring.memory.map, dtype=torch.uint8)
        self.sides = open_sides(self._bytes, devices)
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._routes: dict[int, list[_Route]] = {}
        self._holds: deque[_Hold] = deque()
        self._old_holds = 0
        self._pieces: list[_Piece] = []
        self._in_flight: list[_Flight] = []
        self._overflow: list[tuple[Side, _Piece]] = []
        self.live_bytes: int | None = None  # of state the link can take before the next step
        self._clones: list[_Hold] = []
        self.snapshots = 0  # pieces that were copied on the device first
        self._uncommitted: list[int] = []

    # ------------------------------------------------------------------ gradients

    def gradients(
        self, at: int, optimizer: int, layout: GradientLayout, gradients: Gradients
    ) -> None:
        """Copy the gradients that are there to `at` plus their offsets; those of GPUs are held."""
        views = self._gradient_views(at, optimizer, layout, gradients)
        with torch.no_grad():
            for route in self._routes_of(optimizer, layout, gradients):
                self._send(route, at, views, gradients)

    def some_gradients(
        self, at: int, optimizer: int, layout: GradientLayout, gradients: dict[int, torch.Tensor]
    ) -> None:
        """Copy large gradients ahead of the others, by their place in the optimizer's order."""
        with torch.no_grad():
            for device in _devices(list(gradients.values())):
                side = self.sides[device]
                own = {i: g for i, g in gradients.items() if g.device == device}
                targets = [_typed(self._bytes, at + layout.offsets[i], g) for i, g in own.items()]
                side.follow()
                side.offload(targets, list(own.values()))
                self._holds.append(_Hold(side, side.mark(), list(own.values())))

    def read_later(self, value: torch.Tensor) -> tuple[torch.Tensor, Side, Any]:
        """Bring a small device tensor to the host; it may be looked at once its mark has passed."""
        side = self.sides[value.device]
        target = side.host_like(value)
        side.follow()
        side.offload([target], [value])
        self._holds.append(_Hold(side, side.mark(), [value]))
        return target, side, self._holds[-1].mark

    def _routes_of(
        self, optimizer: int, layout: GradientLayout, gradients: Gradients
    ) -> list[_Route]:
        if optimizer in self._routes:
            return self._routes[optimizer]
        if any(g is None for g in gradients):  # lay routes out when all have been seen
            return [self._plain_route(device, gradients) for device in _devices(gradients)]
        self._routes[optimizer] = self._lay_out(layout, gradients)
        return self._routes[optimizer]

    def _send(
        self, route: _Route, at: int, views: list[torch.Tensor], gradients: Gradients
    ) -> None:
        if route.side is None:
            for part in route.parts:
                targets, sources = _pairs(part, views, gradients)
                if sources:
                    torch._foreach_copy_(targets, sources)
            return
        side = route.side
        side.follow()
        for pack in route.packs:
            targets, sources = _pairs(pack.members, pack.views, gradients, positional=True)
            if sources:
                side.pack(targets, sources)
                end = at + pack.start + pack.bytes
                packed = self._bytes[at + pack.start : end]
                side.offload([packed], [side.staging()[: pack.bytes]])
                self._holds.append(_Hold(side, side.mark(), sources))
        for part in route.parts:
            targets, sources = _pairs(part, views, gradients)
            if sources:
                side.offload(targets, sources)
                self._holds.append(_Hold(side, side.mark(), sources))

    def _lay_out(self, layout: GradientLayout, gradients: Gradients) -> list[_Route]:
        """Small gradients together through the staging, large ones directly, in a few parts."""
        devices = _devices(gradients)
        side = self.sides.get(devices[0]) if len(devices) == 1 else None
        if side is None:
            return [self._plain_route(device, gradients) for device in devices]
        order = sorted(range(len(gradients)), key=lambda i: layout.offsets[i])
        sizes = [align(g.nbytes) if g is not None else 0 for g in gradients]
        small = [i for i in order if sizes[i] <= PACKED_BYTES_MAX]
        large = [i for i in order if sizes[i] > PACKED_BYTES_MAX]
        packs = [
            self._pack(side, members, layout, gradients)
            for members in _cut(small, sizes, STAGING_BYTES - PACKED_BYTES_MAX)
        ]
        part_bytes = max(_PART_BYTES, -(-sum(sizes) // _PARTS_MAX))
        return [_Route(side, packs, _cut(large, sizes, part_bytes))]

    def _pack(
        self, side: Side, members: list[int], layout: GradientLayout, gradients: Gradients
    ) -> _Pack:
        start = layout.offsets[members[0]]
        views, end = [], start
        for member in members:
            gradient = gradients[member]
            assert gradient is not None
            at = layout.offsets[member] - start
            end = layout.offsets[member] + gradient.nbytes
            views.append(_typed(side.staging(), at, gradient))
        return _Pack(members, start, end - start, views)

    def _plain_route(self, device: torch.device, gradients: Gradients) -> _Route:
        members = [i for i, g in enumerate(gradients) if g is not None and g.device == device]
        return _Route(self.sides.get(device), [], [members])

    def _gradient_views(
        self, at: int, optimizer: int, layout: GradientLayout, gradients: Gradients
    ) -> list[torch.Tensor]:
        # a slot is used again and again with the same layout: typed views of it are kept
        views = self._views.setdefault((at, optimizer), [])
        if len(views) != len(gradients) or any(
            g is not None and v.shape != g.shape for v, g in zip(views, gradients, strict=False)
        ):
            views[:] = [
                _typed(self._bytes, at + offset, g) if g is not None else self._bytes[:0]
                for offset, g in zip(layout.offsets, gradients, strict=True)
            ]
        return views

    @property
    def held_bytes(self) -> list[int]:
        """Parts of gradients that are kept alive for their copies, oldest first."""
        return [sum(g.nbytes for g in hold.gradients) for hold in self._holds]

    def release(self, keep: int = 0) -> None:
        """Let go of gradients, oldest first: the compute stream waits for their copies, so whatever
        comes to lie in their memory comes later."""
        while len(self._holds) > keep:
            hold = self._holds.popleft()
            hold.side.hold_back(hold.mark)
            self._old_holds = max(0, self._old_holds - 1)

    def grow_old(self) -> None:
        """A step is over: what is held now belongs to it."""
        self._old_holds = len(self._holds)

    def release_old(self) -> None:
        """Let go of what belongs to steps that are over."""
        self.release(keep=len(self._holds) - self._old_holds)

    # ------------------------------------------------------------------ state

    def piece(self, at: int, source: torch.Tensor, start: int, size: int, *, stays: bool) -> None:
        """Copy `size` bytes of a tensor, from byte `start` of its row-major form."""
        flat = source.detach().contiguous().view(-1).view(torch.uint8)[start : start + size]
        target = self._bytes[at : at + size]
        if source.device in self.sides:
            self._pieces.append(_Piece(target, flat, stays))
        else:
            target.copy_(flat)

    def send_pieces(self) -> None:
        """Queue the copies of pieces: those whose sources may change right after this, then as many of
        the others as the link can take before the next step. The rest waits for that step."""
        pieces, self._pieces = self._pieces, []
        for device, side in self.sides.items() if pieces else ():
            own = [p for p in pieces if p.source.device == device]
            side.follow()
            if changing := [p for p in own if not p.stays]:
                self._send_changing(side, changing)
            if steady := [p for p in own if p.stays]:
                now, later = self._divide(steady)
                self._in_flight.append(_Flight(side, _offload(side, now), now))
                self._overflow += [(side, piece) for piece in later]

    def _send_changing(self, side: Side, pieces: list[_Piece]) -> None:
        """Little is snapshotted first, or the compute stream would wait for all gradients queued before."""
        if sum(piece.source.nbytes for piece in pieces) > _CLONED_BYTES_MAX:
            side.hold_back(_offload(side, pieces))
            return
        clones = [piece._replace(source=piece.source.clone()) for piece in pieces]
        side.follow()
        self._holds.append(_Hold(side, _offload(side, clones), [c.source for c in clones]))

    def forget_pieces(self) -> None:
        """What was about to be sent is not wanted any more."""
        self._pieces.clear()

    def _divide(self, pieces: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
        """Pieces that leave as they are, and those that memory decides about when the step comes."""
        if self.live_bytes is None:
            return pieces, []
        whole = [piece.target.nbytes for piece in pieces]
        if sum(whole) > self.live_bytes:
            parts = cut(whole, _CUT_BYTES)
            pieces = [pieces[number].part(start, size) for number, start, size in parts]
        sizes = [piece.target.nbytes for piece in pieces]
        schedule = plan_offload(sizes, [Phase(self.live_bytes, 0), Phase(0, 0)], update=1)
        self.live_bytes -= sum(sizes[i] for i in schedule.live)
        return [pieces[i] for i in schedule.live], [pieces[i] for i in schedule.late]

    @property
    def state_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def state_has_landed(self) -> bool:
        return not self._overflow and all(f.side.passed(f.mark) for f in self._in_flight)

    def hold_back_for_state(self) -> None:
        """State may change from here on: the compute stream waits for its copies. What the link had no
        time for is snapshotted where memory is free without raising the peak; the rest is waited for."""
        overflow, self._overflow = self._overflow, []
        self.release_snapshots()
        free = self.peak_bytes - self.allocated_bytes if overflow else 0
        for side, piece in overflow:
            side.follow()
            if piece.source.nbytes <= free:
                free -= piece.source.nbytes
                clone = piece.source.clone()
                side.follow()
                side.offload([piece.target], [clone])
                self._clones.append(_Hold(side, side.mark(), [clone]))
                self.snapshots += 1
            else:
                self._in_flight.append(_Flight(side, _offload(side, [piece]), [piece]))
        for flight in self._in_flight:
            flight.side.hold_back(flight.mark)

    def release_snapshots(self) -> None:
        """Activations will need the memory that was free for them."""
        clones, self._clones = self._clones, []
        for clone in clones:
            clone.side.hold_back(clone.mark)

    # ------------------------------------------------------------------ slots

    def commit(self, ticket: int) -> None:
        """Say that a slot's payload is there; while state is in flight `settle` says it later."""
        self.send_pieces()
        if self._in_flight:
            self._uncommitted.append(ticket)
        else:
            self._write_word(ticket)

    def settle(self, *, intact: bool) -> bool:
        """The state in flight did not change until it was copied (`intact`), or it did: commit its
        slots, as they are or as a gap. True if a gap was made."""
        tickets, self._uncommitted = self._uncommitted, []
        self._in_flight.clear()
        if not intact and tickets:
            self._ring.void(tickets)
        for ticket in tickets:
            self._write_word(ticket)
        return not intact and bool(tickets)

    def _write_word(self, ticket: int) -> None:
        if not self.sides:
            self._ring.commit_device(ticket)
            return
        first, *others = self.sides.values()
        for other in others:
            first.wait_for(other.mark())  # the word comes behind everybody's copies
        at = self._ring.slot_at(ticket) + SLOT_DEVICE_WORD_AT
        first.write_word(self._bytes[at : at + 8], commit_word(self._ring.nonce, ticket))

    # ------------------------------------------------------------------ figures and the end

    @property
    def stall_seconds(self) -> float:
        return sum(side.stall_seconds for side in self.sides.values())

    def open_window(self) -> None:
        """From here on, until the next step, state does not change."""
        for side in self.sides.values():
            side.open_window()

    def close_window(self) -> None:
        for side in self.sides.values():
            side.close_window()

    @property
    def window_seconds(self) -> float:
        return min((s.window_seconds for s in self.sides.values()), default=0.0)

    @property
    def link_bytes_per_second(self) -> float:
        return min((s.link_bytes_per_second for s in self.sides.values()), default=0.0)

    @property
    def allocated_bytes(self) -> int:
        return sum(side.allocated_bytes for side in self.sides.values())

    @property
    def peak_bytes(self) -> int:
        return sum(side.peak_bytes for side in self.sides.values())

    def close(self) -> None:
        close_sides(self._bytes, self.sides)
        self._holds.clear()
        self._clones.clear()


def _offload(side: Side, pieces: list[_Piece]) -> Any:
    if pieces:
        side.offload([p.target for p in pieces], [p.source for p in pieces])
    return side.mark()


def _devices(gradients: Gradients) -> list[torch.device]:
    return list(dict.fromkeys(g.device for g in gradients if g is not None))


def _pairs(
    members: list[int], views: list[torch.Tensor], gradients: Gradients, positional: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Targets and sources of the gradients that are there."""
    targets, sources = [], []
    for place, member in enumerate(members):
        gradient = gradients[member]
        if gradient is not None:
            targets.append(views[place if positional else member])
            sources.append(gradient)
    return targets, sources


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
