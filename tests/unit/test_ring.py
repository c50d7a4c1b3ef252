"""The ring against a plain queue, with a writer that stops at any point and a reader that lags."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from everystep.core.events import Rebase
from everystep.core.geometry import RING_HEADER_BYTES, SLOT_HEADER_BYTES, Geometry
from everystep.format.slot import (
    FLAG_GAP,
    FLAG_SEALED,
    SLOT_HOST_WORD_AT,
    commit_word,
    pack_events,
)
from everystep.lane.arena import SharedMemory
from everystep.lane.ring import RingReader, RingWriter

GEOMETRY = Geometry(slots=3, slot_bytes=4096)


def make() -> tuple[RingWriter, RingReader]:
    memory = SharedMemory.create(GEOMETRY.bytes, "test")
    return RingWriter(memory, GEOMETRY, nonce=99), RingReader(memory, GEOMETRY)


def publish(ring: RingWriter, ticket: int, number: int) -> None:
    document, checksum = pack_events([Rebase((number,), (number,))])
    ring.publish(
        ticket,
        flags=FLAG_SEALED,
        step=number,
        payload_bytes=64,
        document=document,
        checksum=checksum,
    )
    ring.commit_device(ticket)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["write", "read", "release"]), max_size=60))
def test_against_a_queue(actions: list[str]) -> None:
    writer, reader = make()
    waiting: deque[int] = deque()
    held: deque[tuple[int, int]] = deque()
    written = 0
    for action in actions:
        if action == "write":
            ticket = writer.take()
            assert (ticket is None) == (len(waiting) + len(held) == GEOMETRY.slots)
            if ticket is not None:
                publish(writer, ticket, written)
                waiting.append(written)
                written += 1
        elif action == "read":
            entry = reader.read()
            assert (entry is None) == (not waiting)
            if entry is not None:
                expected = waiting.popleft()
                assert entry.step == expected and entry.sealed
                assert entry.events == [Rebase((expected,), (expected,))]
                held.append((entry.ticket, expected))
        elif held:
            reader.release(held.popleft()[0])
        assert writer.free == GEOMETRY.slots - len(waiting) - len(held)
    writer.memory.close()


def test_an_entry_exists_only_with_both_words() -> None:
    writer, reader = make()
    ticket = writer.take()
    assert ticket is not None
    document, checksum = pack_events([])
    writer.publish(ticket, flags=0, step=1, payload_bytes=0, document=document, checksum=checksum)
    assert reader.read() is None, "the device has not committed"
    writer.commit_device(ticket)
    assert reader.read() is not None


def test_a_word_of_the_lap_before_does_not_count() -> None:
    writer, reader = make()
    for number in range(GEOMETRY.slots):
        ticket = writer.take()
        assert ticket is not None
        publish(writer, ticket, number)
        entry = reader.read()
        assert entry is not None
        reader.release(entry.ticket)
    assert writer.take() == GEOMETRY.slots  # same slot, next lap, nothing written yet
    assert reader.read() is None
    stale = writer.memory.words[(RING_HEADER_BYTES + SLOT_HOST_WORD_AT) // 8]
    assert stale == commit_word(99, 0)


def test_requests_travel_once() -> None:
    writer, reader = make()
    assert writer.requested_atoms() == []
    reader.request_atoms([5, 2, 5])
    assert writer.requested_atoms() == [2, 5]
    assert writer.requested_atoms() == []
    reader.request_atoms(None)
    assert writer.requested_atoms() is None
    reader.request_atoms(range(5000))  # more than the header page can name: all
    assert writer.requested_atoms() is None


def test_a_voided_slot_reads_as_a_gap_whatever_lands_in_its_payload() -> None:
    """Copies that were queued before arrive after it was voided."""
    writer, reader = make()
    ticket = writer.take()
    assert ticket is not None
    document, checksum = pack_events([Rebase((1,), (2,))])
    writer.publish(
        ticket, flags=FLAG_SEALED, step=7, payload_bytes=1024, document=document, checksum=checksum
    )
    writer.void([ticket])
    start = writer.slot_at(ticket) + SLOT_HEADER_BYTES
    writer.memory.view[start : start + 1024] = b"\xff" * 1024
    writer.commit_device(ticket)
    entry = reader.read()
    assert entry is not None and entry.flags == FLAG_GAP and entry.events == []
