"""The ring's bytes: its header and the header of a slot. Offsets are specified in docs/FORMAT.md.

A slot is: header, payload (tensor bytes), document (the events, msgpack). It exists when both
commit words hold the word of its ticket: the device's, written behind the last copy, and the
host's, written when the entry is finished.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import xxhash

from everystep.core.events import Event
from everystep.errors import CorruptData
from everystep.format.document import MALFORMED

VERSION = 1
MAGIC = 0x544C5345  # "ESLT"
FLAG_SEALED = 1
FLAG_GAP = 2  # records were dropped before this entry: a replica must be re-based

SLOT_FIELDS: tuple[tuple[str, str], ...] = (
    ("magic", "I"),
    ("version", "H"),
    ("flags", "H"),
    ("nonce", "Q"),
    ("ticket", "Q"),
    ("step", "Q"),
    ("payload_bytes", "Q"),
    ("document_at", "Q"),
    ("document_bytes", "Q"),
    ("document_checksum", "Q"),
)
_SLOT = struct.Struct("<" + "".join(code for _, code in SLOT_FIELDS))

# byte offsets of single words, each written by one side only
SLOT_DEVICE_WORD_AT = 64
SLOT_HOST_WORD_AT = 72
RING_NONCE_AT = 0
RING_TAKEN_AT = 64
RING_REQUEST_ANSWERED_AT = 72
RING_DROPPED_AT = 80
RING_RELEASED_AT = 128
RING_WARM_AT = 144
RING_REQUEST_AT = 152
RING_REQUEST_COUNT_AT = 160
RING_REQUEST_ATOMS_AT = 192
RING_NOTICE_AT = 3072
RING_NOTICE_TEXT_AT = 3080
REQUEST_ALL = 0xFFFFFFFF

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Event])


class SlotHeader(NamedTuple):
    flags: int
    nonce: int
    ticket: int
    step: int
    payload_bytes: int
    document_at: int
    document_bytes: int
    document_checksum: int


def commit_word(nonce: int, ticket: int) -> int:
    """Never equal for two tickets of one ring, so a word left from the lap before does not count."""
    return (nonce ^ ((ticket + 1) * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF


def pack_slot_header(header: SlotHeader) -> bytes:
    return _SLOT.pack(MAGIC, VERSION, *header)


def unpack_slot_header(data: bytes | memoryview) -> SlotHeader:
    magic, version, *rest = _SLOT.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise CorruptData(f"slot header: magic {magic:#x} version {version}, expected {MAGIC:#x} 1")
    return SlotHeader(*rest)


def pack_events(events: list[Event]) -> tuple[bytes, int]:
    document = _encoder.encode(events)
    return document, xxhash.xxh3_64_intdigest(document)


def unpack_events(document: bytes | memoryview, checksum: int) -> list[Event]:
    if xxhash.xxh3_64_intdigest(document) != checksum:
        raise CorruptData(f"slot document of {len(document)} bytes: checksum does not match")
    try:
        return _decoder.decode(document)
    except MALFORMED as error:
        raise CorruptData(f"slot document: {error}") from error
