"""Entries outside the ring: a log tail is the ring's slots, one after the other, lengths in front."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from everystep.core.events import Event
from everystep.errors import CorruptData
from everystep.format.slot import unpack_events

_FRAME = struct.Struct("<QQQ")  # document bytes, document checksum, payload bytes


def frame_entry(document: bytes, checksum: int, payload: bytes | memoryview) -> bytes:
    return b"".join((frame_head(document, checksum, len(payload)), payload))


def frame_head(document: bytes, checksum: int, payload_bytes: int) -> bytes:
    """What stands in front of an entry's payload."""
    return _FRAME.pack(len(document), checksum, payload_bytes) + document


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
