"""State into the ring: copied between a seal and the next step, while it does not change.

What the link has no time for is snapshotted on the device right before that step, in memory that is free
without raising the peak, or the step waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from everystep.capture.copying.in_flight import InFlightBuffers
from everystep.core.schedule import Stretch, cut, plan_offload
from everystep.device.copy_stream import CopyStream

_CLONED_BYTES_MAX = 4 << 20
_CUT_BYTES = 16 << 20  # state that does not fit before the next step is divided this finely


class _Flight(NamedTuple):
    """State on its way. What is a copy of it, because it does not lie row by row, is kept."""

    side: CopyStream
    mark: Any
    copies: list[torch.Tensor]


class _Piece(NamedTuple):
    target: torch.Tensor
    source: torch.Tensor
    stays: bool  # the source does not change before the next step
    copied: bool  # the source is our own copy

    def part(self, start: int, size: int) -> _Piece:
        end = start + size
        return _Piece(self.target[start:end], self.source[start:end], self.stays, self.copied)


class StateCopies:
    """Owned by the training thread."""

    def __init__(
        self, memory: torch.Tensor, sides: dict[torch.device, CopyStream], holds: InFlightBuffers
    ) -> None:
        self._bytes = memory
        self._sides = sides
        self._holds = holds
        self._pieces: list[_Piece] = []
        self._in_flight: list[_Flight] = []
        self._overflow: list[tuple[CopyStream, _Piece]] = []
        self._snapshots = InFlightBuffers()
        self.live_bytes: int | None = None  # of state the link can take before the next step
        self.snapshots = 0  # pieces that were copied on the device first

    def piece(self, at: int, source: torch.Tensor, start: int, size: int, *, stays: bool) -> None:
        """Copy `size` bytes of a tensor, from byte `start` of its row-major form."""
        flat = source.detach().contiguous().view(-1).view(torch.uint8)[start : start + size]
        target = self._bytes[at : at + size]
        if source.device in self._sides:
            self._pieces.append(_Piece(target, flat, stays, not source.is_contiguous()))
        else:
            target.copy_(flat)

    def send(self) -> None:
        """Queue the copies of pieces: those whose sources may change right after this, then as many of
        the others as the link can take before the next step. The rest waits for that step."""
        pieces, self._pieces = self._pieces, []
        for device, side in self._sides.items() if pieces else ():
            own = [p for p in pieces if p.source.device == device]
            side.follow()
            if changing := [p for p in own if not p.stays]:
                self._send_changing(side, changing)
            if steady := [p for p in own if p.stays]:
                now, later = self._divide(steady)
                self._in_flight.append(_flight(side, now))
                self._overflow += [(side, piece) for piece in later]

    def _send_changing(self, side: CopyStream, pieces: list[_Piece]) -> None:
        """Little is snapshotted first, or the compute stream would wait for all gradients queued before."""
        if sum(piece.source.nbytes for piece in pieces) > _CLONED_BYTES_MAX:
            side.wait_for_copy(_offload(side, pieces))
            return
        clones = [piece._replace(source=piece.source.clone()) for piece in pieces]
        side.follow()
        _offload(side, clones)
        self._holds.add(side, [clone.source for clone in clones])

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
        schedule = plan_offload(sizes, [Stretch(self.live_bytes, 0), Stretch(0, 0)], update=1)
        self.live_bytes -= sum(sizes[i] for i in schedule.live)
        return [pieces[i] for i in schedule.live], [pieces[i] for i in schedule.late]

    @property
    def in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def has_landed(self) -> bool:
        return not self._overflow and all(f.side.passed(f.mark) for f in self._in_flight)

    def wait_for_copy(self) -> None:
        """State may change from here on: the compute stream waits for its copies. What the link had no
        time for is snapshotted where memory is free without raising the peak; the rest is waited for."""
        self.release_snapshots()
        if self._overflow:
            self._send_overflow()
        for flight in self._in_flight:
            flight.side.wait_for_copy(flight.mark)

    def _send_overflow(self) -> None:
        overflow, self._overflow = self._overflow, []
        sizes = [piece.source.nbytes for _, piece in overflow]
        free = sum(side.peak_bytes - side.allocated_bytes for side in self._sides.values())
        schedule = plan_offload(sizes, [Stretch(0, 0), Stretch(sum(sizes), free)], update=1)
        for side, piece in (overflow[i] for i in schedule.snapshot):
            clone = piece._replace(source=piece.source.clone())
            side.follow()
            _offload(side, [clone])
            self._snapshots.add(side, [clone.source])
            self.snapshots += 1
        for side, piece in (overflow[i] for i in schedule.late):
            side.follow()
            self._in_flight.append(_flight(side, [piece]))

    def release_snapshots(self) -> None:
        """Activations will need the memory that was free for them."""
        self._snapshots.release()

    def clear(self) -> None:
        """Everything has been copied, or changed before it was."""
        self._in_flight.clear()


def _flight(side: CopyStream, pieces: list[_Piece]) -> _Flight:
    return _Flight(side, _offload(side, pieces), [p.source for p in pieces if p.copied])


def _offload(side: CopyStream, pieces: list[_Piece]) -> Any:
    if pieces:
        side.offload([p.target for p in pieces], [p.source for p in pieces])
    return side.mark()
