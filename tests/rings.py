"""Slots of a ring, filled as a trainer fills them."""

from __future__ import annotations

from collections.abc import Sequence

from everystep.core.events import Event
from everystep.core.geometry import SLOT_HEADER_BYTES
from everystep.format.slot import pack_events
from everystep.lane.ring import RingWriter


def publish(
    ring: RingWriter, events: Sequence[Event], payload: bytes = b"", flags: int = 0, step: int = 0
) -> None:
    """The next slot; there must be a free one."""
    ticket = ring.take()
    assert ticket is not None
    start = ring.slot_at(ticket) + SLOT_HEADER_BYTES
    ring.memory.view[start : start + len(payload)] = payload
    document, checksum = pack_events(list(events))
    ring.publish(
        ticket,
        flags=flags,
        step=step,
        payload_bytes=len(payload),
        document=document,
        checksum=checksum,
    )
    ring.commit_device(ticket)
