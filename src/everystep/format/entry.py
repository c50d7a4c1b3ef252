"""Entries outside the ring: a log tail is the ring's slots, one after the other, lengths in front."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from everystep.core.census import Census
from everystep.core.events import Event, Planes, Sparse, used_ranges
from everystep.errors import CorruptData
from everystep.format.checks import check_entry, check_record
from everystep.format.contents import check_event_contents
from everystep.format.log import LoggedRecord
from everystep.format.planes import check_planes, check_readable
from everystep.format.slot import unpack_events
from everystep.format.sparse import checked

_FRAME = struct.Struct("<QQQ")  # document bytes, document checksum, payload bytes


def frame_entry(document: bytes, checksum: int, payload: bytes | memoryview) -> bytes:
    return b"".join((frame_head(document, checksum, len(payload)), payload))


def frame_head(document: bytes, checksum: int, payload_bytes: int) -> bytes:
    """What stands in front of an entry's payload."""
    return _FRAME.pack(len(document), checksum, payload_bytes) + document


def checked_entries(
    data: memoryview, census: Census, where: str
) -> Iterator[tuple[list[Event], memoryview]]:
    """The same, held against the census that they speak of."""
    for events, payload in unframe_entries(data):
        check_entry(events, len(payload), census, where)
        check_event_contents(events, census, where)
        yield events, payload


def check_entries(data: memoryview, census: Census, where: str) -> list[Event]:
    """All of them, and that their payloads can be unpacked; returns the events of the last one."""
    events: list[Event] = []
    for events, payload in checked_entries(data, census, where):
        check_readable(events)
        _check_payload(events, payload, census, where)
    return events


def check_body(record: LoggedRecord, census: Census, where: str) -> None:
    """A whole record of a log."""
    events = check_entries(record.body, census, where)
    check_record(events, record.step, record.after, where)


def _check_payload(events: list[Event], payload: memoryview, census: Census, where: str) -> None:
    first = events[0] if events else None
    try:
        if isinstance(first, Planes):
            check_planes(first, payload)
        elif isinstance(first, Sparse):
            checked(first, payload, used_ranges(events, census))
    except CorruptData as error:
        raise CorruptData(f"read {where}: {error}") from error


def unframe_entries(data: memoryview) -> Iterator[tuple[list[Event], memoryview]]:
    """Events and payload of every entry of a tail, oldest first."""
    at = 0
    while at < len(data):
        if at + _FRAME.size > len(data):
            raise CorruptData(f"log tail: {len(data) - at} bytes left, no room for a frame")
        document_bytes, checksum, payload_bytes = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        end = start + document_bytes + payload_bytes
        if end > len(data):
            raise CorruptData(f"log tail: an entry ends at byte {end} of {len(data)}")
        middle = start + document_bytes
        yield unpack_events(data[start:middle], checksum), data[middle:end]
        at = end
