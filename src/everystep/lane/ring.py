"""The ring: slots in shared memory that a trainer fills and a shadow empties, without locks.

States of a slot, and who moves it on:

    FREE ──take (trainer)──▶ FILLING ──publish (both commit words)──▶ PUBLISHED
      ▲                                                                  │
      └──────────────────── release (shadow) ◀── HELD ◀──read (shadow)───┘

A slot is never copied to change state: FREE and HELD follow from two counters (`taken`, written by
the trainer; `released`, written by the shadow), FILLING and PUBLISHED from its commit words. What is
PUBLISHED when the trainer dies is as good as read; what is FILLING is lost with the trainer.
Each word has one writer. The trainer's side belongs to the training thread, the shadow's side to the
shadow's main thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from everystep.core.events import Event
from everystep.core.geometry import RING_HEADER_BYTES, SLOT_HEADER_BYTES, Geometry
from everystep.errors import LaneError
from everystep.format import slot as fmt
from everystep.lane.arena import SharedMemory

_REQUEST_ATOMS_MAX = (fmt.RING_NOTICE_AT - fmt.RING_REQUEST_ATOMS_AT) // 4
_NOTICE_BYTES_MAX = RING_HEADER_BYTES - fmt.RING_NOTICE_TEXT_AT


class _Ring:
    def __init__(self, memory: SharedMemory, geometry: Geometry) -> None:
        self.memory = memory
        self.geometry = geometry
        self._words = memory.words

    def _get(self, at: int) -> int:
        return self._words[at // 8]

    def _set(self, at: int, value: int) -> None:
        self._words[at // 8] = value

    def slot_at(self, ticket: int) -> int:
        """Byte offset of the slot a ticket stands for."""
        return RING_HEADER_BYTES + (ticket % self.geometry.slots) * self.geometry.slot_bytes

    @property
    def taken(self) -> int:
        return self._get(fmt.RING_TAKEN_AT)

    @property
    def released(self) -> int:
        return self._get(fmt.RING_RELEASED_AT)


class RingWriter(_Ring):
    """The trainer's side."""

    def __init__(self, memory: SharedMemory, geometry: Geometry, nonce: int) -> None:
        super().__init__(memory, geometry)
        self.nonce = nonce
        self._next = self.taken
        self._set(fmt.RING_NONCE_AT, nonce)

    @property
    def free(self) -> int:
        return self.geometry.slots - (self.taken - self.released)

    @property
    def shadow_is_warm(self) -> bool:
        """True once the shadow replays; until then a full ring only means that it is starting."""
        return bool(self._get(fmt.RING_WARM_AT))

    @property
    def notice(self) -> str:
        """What is wrong with the shadow, in its own words; also after it died."""
        size = min(self._get(fmt.RING_NOTICE_AT), _NOTICE_BYTES_MAX)
        start = fmt.RING_NOTICE_TEXT_AT
        return bytes(self.memory.view[start : start + size]).decode(errors="replace")

    def take(self) -> int | None:
        """The next ticket, or None if every slot is in use."""
        ticket = self.taken
        if ticket != self._next:  # the shadow would wait for a slot that nobody fills
            raise LaneError(
                f"ring: slot {ticket} is the next, expected {self._next}: another process writes into it"
            )
        if self.free <= 0:
            return None
        self._next = ticket + 1
        self._set(fmt.RING_TAKEN_AT, self._next)
        return ticket

    def say_dropped(self, step: int) -> None:
        """A step was sealed that no record tells of: who resumes is told how many were lost."""
        self._set(fmt.RING_DROPPED_AT, step)

    def last_is_sealed(self, step: int) -> bool:
        """Whether the slot taken last ends this step's record, and is there for the shadow to read."""
        ticket = self._next - 1
        if ticket < 0:
            return False
        start, word = self.slot_at(ticket), fmt.commit_word(self.nonce, ticket)
        words = (start + fmt.SLOT_HOST_WORD_AT, start + fmt.SLOT_DEVICE_WORD_AT)
        if any(self._get(at) != word for at in words):
            return False
        header = fmt.unpack_slot_header(self.memory.view[start : start + SLOT_HEADER_BYTES])
        return header.step == step and bool(header.flags & fmt.FLAG_SEALED)

    def commit_device(self, ticket: int) -> None:
        """Say that the payload is there; on a GPU the last copy of the side stream says it."""
        at = self.slot_at(ticket) + fmt.SLOT_DEVICE_WORD_AT
        self._set(at, fmt.commit_word(self.nonce, ticket))

    def publish(
        self,
        ticket: int,
        *,
        flags: int,
        step: int,
        payload_bytes: int,
        document: bytes,
        checksum: int,
    ) -> None:
        """Write document and header, then the host's commit word: from here on the entry exists."""
        start = self.slot_at(ticket)
        document_at = SLOT_HEADER_BYTES + payload_bytes
        view = self.memory.view
        view[start + document_at : start + document_at + len(document)] = document
        header = fmt.pack_slot_header(
            fmt.SlotHeader(
                flags, self.nonce, ticket, step, payload_bytes, document_at, len(document), checksum
            )
        )
        view[start : start + len(header)] = header
        self._set(start + fmt.SLOT_HOST_WORD_AT, fmt.commit_word(self.nonce, ticket))

    def void(self, tickets: Iterable[int]) -> None:
        """Turn published slots whose device word is not there yet into gaps: nothing was read."""
        for ticket in tickets:
            at = self.slot_at(ticket)
            header = fmt.unpack_slot_header(self.memory.view[at : at + SLOT_HEADER_BYTES])
            empty, checksum = fmt.pack_events([])
            self.publish(
                ticket,
                flags=fmt.FLAG_GAP,
                step=header.step,
                payload_bytes=header.payload_bytes,  # late copies still land there
                document=empty,
                checksum=checksum,
            )

    def requested_atoms(self) -> list[int] | None:
        """Atoms the shadow wants to be re-based; None means all of them, [] none."""
        request = self._get(fmt.RING_REQUEST_AT)
        if request == self._get(fmt.RING_REQUEST_ANSWERED_AT):
            return []
        self._set(fmt.RING_REQUEST_ANSWERED_AT, request)
        count = self._get(fmt.RING_REQUEST_COUNT_AT)
        if count == fmt.REQUEST_ALL:
            return None
        start = fmt.RING_REQUEST_ATOMS_AT
        return list(self.memory.view[start : start + 4 * count].cast("I"))


class Entry(NamedTuple):
    """One published slot, still lying in the ring."""

    ticket: int
    flags: int
    step: int
    events: list[Event]
    payload: memoryview

    @property
    def sealed(self) -> bool:
        return bool(self.flags & fmt.FLAG_SEALED)


class RingReader(_Ring):
    """The shadow's side."""

    def __init__(self, memory: SharedMemory, geometry: Geometry) -> None:
        super().__init__(memory, geometry)
        self.nonce = self._get(fmt.RING_NONCE_AT)
        self._next = self.released

    def read(self) -> Entry | None:
        """The next published entry, or None. It is HELD until `release` passes its ticket."""
        if not self.readable:
            return None
        start = self.slot_at(self._next)
        view = self.memory.view[start : start + self.geometry.slot_bytes]
        header = fmt.unpack_slot_header(view)
        document = bytes(view[header.document_at : header.document_at + header.document_bytes])
        events = fmt.unpack_events(document, header.document_checksum)
        payload = view[SLOT_HEADER_BYTES : SLOT_HEADER_BYTES + header.payload_bytes]
        self._next += 1
        return Entry(
            header.ticket,
            header.flags,
            header.step,
            events,
            payload,
        )

    @property
    def readable(self) -> bool:
        """Whether an entry is published that has not been read."""
        if self._next >= self.taken:
            return False
        start, word = self.slot_at(self._next), fmt.commit_word(self.nonce, self._next)
        words = (start + fmt.SLOT_HOST_WORD_AT, start + fmt.SLOT_DEVICE_WORD_AT)
        return all(self._get(at) == word for at in words)

    @property
    def dropped_step(self) -> int:
        return self._get(fmt.RING_DROPPED_AT)

    @property
    def waiting(self) -> int:
        """Slots taken by the trainer and not yet released."""
        return self.taken - self.released

    def release(self, ticket: int) -> None:
        """Free every slot up to and including this ticket's."""
        self._set(fmt.RING_RELEASED_AT, ticket + 1)

    def release_read(self) -> None:
        """Free every slot that has been read."""
        self._set(fmt.RING_RELEASED_AT, self._next)

    def skip(self) -> None:
        """Whatever else was taken is not read: nobody is left who fills it."""
        self._next = self.taken

    def say_warm(self) -> None:
        self._set(fmt.RING_WARM_AT, 1)

    def put_notice(self, text: str) -> None:
        """Have the trainer tell what is wrong; empty: nothing is. A trainer that reads at this moment may see
        parts of two texts, and the right one at its next look."""
        data = text.encode()[:_NOTICE_BYTES_MAX]
        start = fmt.RING_NOTICE_TEXT_AT
        self.memory.view[start : start + len(data)] = data
        self._set(fmt.RING_NOTICE_AT, len(data))

    def request_atoms(self, atoms: Iterable[int] | None) -> None:
        """Ask the trainer to re-base these atoms; None means all."""
        wanted = None if atoms is None else sorted(set(atoms))
        if wanted is None or len(wanted) > _REQUEST_ATOMS_MAX:
            self._set(fmt.RING_REQUEST_COUNT_AT, fmt.REQUEST_ALL)
        else:
            start = fmt.RING_REQUEST_ATOMS_AT
            self.memory.view[start : start + 4 * len(wanted)].cast("I")[:] = _as_words(wanted)
            self._set(fmt.RING_REQUEST_COUNT_AT, len(wanted))
        self._set(fmt.RING_REQUEST_AT, self._get(fmt.RING_REQUEST_AT) + 1)


def _as_words(values: list[int]) -> memoryview:
    data = b"".join(value.to_bytes(4, "little") for value in values)
    return memoryview(data).cast("I")
