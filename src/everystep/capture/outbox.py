"""Fills slots: events one after the other, tensors beside them. Owned by the training thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from everystep.capture.copying.copier import Copier
from everystep.core.census import align
from everystep.core.dtypes import tensor_bytes
from everystep.core.events import Edit, Event
from everystep.core.geometry import SLOT_HEADER_BYTES
from everystep.errors import CaptureTooLarge
from everystep.format.slot import FLAG_GAP, FLAG_SEALED, pack_events
from everystep.lane.ring import RingWriter
from everystep.replay.tensors import dtype_name

_EVENT_BYTES = 96  # upper bound of an event without its byte strings and names
_PIECE_BYTES_MIN = 4096


class RingFull(Exception):
    """No slot is free and the trainer may not wait: records are dropped from here on."""


class DropIfRingFull:
    """Around what may find the ring full."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        if not isinstance(error, RingFull):
            return False
        # a traceback holds frames, and those of the user's step hold its largest tensors
        error.__traceback__ = None
        self._drop()
        return True


class Outbox:
    def __init__(
        self,
        ring: RingWriter,
        copier: Copier,
        may_wait: Callable[[float, bool], bool],
        before_waiting: Callable[[], None],
    ) -> None:
        self._ring = ring
        self._copier = copier
        self._may_wait = may_wait
        self._before_waiting = before_waiting
        self.patient = False  # what is being sent needs more slots than there are
        self.owes_gap = False  # records are missing, and no slot says so yet
        self._ticket: int | None = None
        self._events: list[Event] = []
        self._document_bytes = 0
        self._step = 0
        self.payload_bytes = self._last_at = 0
        self.bytes_sent = 0
        self.stall_seconds = 0.0

    def begin(self, step: int) -> None:
        """Events from here on belong to this step."""
        self._step = step

    def room(self, payload_bytes: int, document_bytes: int) -> int:
        """Where in the current payload that many bytes may go; turns to a new slot if need be."""
        need = align(payload_bytes) + document_bytes + _EVENT_BYTES
        if need > self._ring.geometry.capacity:
            raise CaptureTooLarge(
                f"record: {need} bytes for one event, a slot takes {self._ring.geometry.capacity}",
                need_bytes=need,
            )
        if self._ticket is not None and self._left() < need:
            self._publish(0)
        if self._ticket is None:
            self._ticket = self._take()
        at = self._last_at = self.payload_bytes
        self.payload_bytes = align(at + payload_bytes)
        self.bytes_sent += payload_bytes
        self._document_bytes += document_bytes + _EVENT_BYTES
        return at

    def address(self, at: int) -> int:
        """Offset in the ring of a place in the current payload."""
        assert self._ticket is not None
        return self._ring.slot_at(self._ticket) + SLOT_HEADER_BYTES + at

    @property
    def ticket(self) -> int | None:
        """The slot being filled."""
        return self._ticket

    def add(self, event: Event) -> None:
        self._events.append(event)

    def give_back_room(self, at: int) -> None:
        """Give back what `room` took last; behind an earlier place others lie by now."""
        if at == self._last_at:
            self.payload_bytes = at

    def tensor(self, atom: int, slot: str, tensor: torch.Tensor, *, stays: bool) -> None:
        """A whole tensor as edits, in as many pieces as slots make it."""
        dtype, shape = dtype_name(tensor, slot or "value"), tuple(tensor.shape)
        size, start = tensor_bytes(dtype, shape), 0
        while start < size or (size == 0 and start == 0):
            names = len(slot) + 8 * len(shape)
            left = self._left() - names - 2 * _EVENT_BYTES if self._ticket is not None else 0
            if left < min(size - start, _PIECE_BYTES_MIN):
                left = self._ring.geometry.capacity - names - 2 * _EVENT_BYTES
            part = min(size - start, left // 64 * 64)
            at = self.room(part, names)
            if part:
                self._copier.state.piece(self.address(at), tensor, start, part, stays=stays)
            self.add(Edit(atom, slot, dtype, shape, start, part, at))
            start += part
            if size == 0:
                return

    def seal(self) -> None:
        self._publish(FLAG_SEALED)

    def abandon(self, *, told: bool = False) -> None:
        """Drop the unfinished record. `told`: a slot is a gap already, which is enough if none is open."""
        self.owes_gap = not told or self._ticket is not None
        self.tell_gap()

    def tell_gap(self) -> None:
        """Tell the shadow that records are missing, once there is a slot to say it in."""
        if not self.owes_gap:
            return
        if self._ticket is None:
            self._ticket = self._ring.take()
            if self._ticket is None:
                return
        self._events.clear()
        self._publish(FLAG_GAP)
        self.owes_gap = False

    def _left(self) -> int:
        return self._ring.geometry.capacity - self.payload_bytes - self._document_bytes

    def _publish(self, flags: int) -> None:
        assert self._ticket is not None
        document, checksum = pack_events(self._events)
        self._ring.publish(
            self._ticket,
            flags=flags,
            step=self._step,
            payload_bytes=self.payload_bytes,
            document=document,
            checksum=checksum,
        )
        self._copier.commit(self._ticket)
        self._ticket, self._events = None, []
        self.payload_bytes = self._document_bytes = 0

    def _take(self) -> int:
        ticket = self._ring.take()
        if ticket is not None:
            return ticket
        began = time.perf_counter()
        self._before_waiting()  # slots whose state is in flight are not committed yet
        try:
            while ticket is None:
                if not self._may_wait(time.perf_counter() - began, self.patient):
                    raise RingFull
                time.sleep(0.0002)
                ticket = self._ring.take()
        finally:
            self.stall_seconds += time.perf_counter() - began
        return ticket
