"""Segments of the log: records one behind the other, each with its checksum and chained to the one before.

A batch of records is padded to whole blocks, so that it can be written past the page cache. What a crash
leaves behind the last whole record does not check out, and ends the log there.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import xxhash

from everystep.core.census import Census
from everystep.core.numbers import STEP_MAX
from everystep.errors import CorruptData, UnknownVersion

BLOCK_BYTES = 4096
_MAGIC = 0x474F4C5045545345  # "ESTEPLOG"
_RECORD_MAGIC = 0x44524F43455245
_SEGMENT = struct.Struct("<QQ32sIIQQQ")  # magic, version, run, term, rank, after, census, checksum
_RECORD = struct.Struct("<QQQQQQ")  # magic, step, after, body bytes, body checksum, chain
HEAD_BYTES = _RECORD.size
_VERSION = 3
_PIECE_BYTES = 4 << 20  # of a body that is digested at once
_digesters: list[ThreadPoolExecutor] = []  # one, once it was needed
os.register_at_fork(after_in_child=_digesters.clear)  # its threads are not in the child


class SegmentHeader(NamedTuple):
    run_id: str
    term: int
    rank: int
    after: int  # the step that its first record follows
    census: int  # which one its records speak of (`census_digest`)


class LoggedRecord(NamedTuple):
    """Everything one step consumed; `body` is its entries as a log tail has them."""

    step: int
    after: int
    body: memoryview


def census_digest(census: Census) -> int:
    """Of what gives records their meaning: names, types and order of atoms and optimizers."""
    optimizers = [(o.key, o.path, o.mode.value, o.groups) for o in census.optimizers]
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([census.atoms, optimizers]))


def pack_segment_header(header: SegmentHeader) -> bytes:
    run_id = header.run_id.encode().ljust(32, b"\0")
    fields = (_MAGIC, _VERSION, run_id, header.term, header.rank, header.after)
    data = _SEGMENT.pack(*fields, header.census, 0)
    return _SEGMENT.pack(*fields, header.census, xxhash.xxh3_64_intdigest(data)).ljust(
        BLOCK_BYTES, b"\0"
    )


def unpack_segment_header(data: memoryview, where: str) -> SegmentHeader:
    if len(data) < BLOCK_BYTES:
        raise CorruptData(f"read {where}: {len(data)} bytes, no room for a header")
    *fields, checksum = _SEGMENT.unpack_from(data)
    if xxhash.xxh3_64_intdigest(_SEGMENT.pack(*fields, 0)) != checksum or fields[0] != _MAGIC:
        raise CorruptData(f"read {where}: its header does not check out")
    if fields[1] > _VERSION:
        raise UnknownVersion(
            f"read {where}: format version {fields[1]}, this everystep knows up to {_VERSION}",
            hint="upgrade everystep to the version that wrote this run",
        )
    if fields[1] != _VERSION:
        raise UnknownVersion(
            f"read {where}: format version {fields[1]}, this everystep knows {_VERSION}",
            hint="it was written before the first release: go on with the everystep that wrote it",
        )
    return SegmentHeader(fields[2].rstrip(b"\0").decode(errors="replace"), *fields[3:])


def body_checksum(body: memoryview) -> int:
    return begin_checksum(body)()


def begin_checksum(body: memoryview) -> Callable[[], int]:
    """Of the digests of its pieces. If there are several, so are the threads that make them, beside whoever
    will ask for it."""
    pieces = [body[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES)]
    if len(pieces) <= 1:
        return lambda: xxhash.xxh3_64_intdigest(b"".join(map(xxhash.xxh3_64_digest, pieces)))
    if not _digesters:
        _digesters.append(ThreadPoolExecutor(4, "everystep-digest"))
    begun = [_digesters[0].submit(xxhash.xxh3_64_digest, piece) for piece in pieces]
    return lambda: xxhash.xxh3_64_intdigest(b"".join(digest.result() for digest in begun))


class Chain:
    """Gives every record of a segment a head that depends on all records before it."""

    def __init__(self, header: SegmentHeader) -> None:
        self._link = xxhash.xxh3_64_intdigest(pack_segment_header(header))

    def head(self, step: int, after: int, size: int, checksum: int) -> bytes:
        told = struct.pack("<QQQQQ", self._link, step, after, size, checksum)
        self._link = xxhash.xxh3_64_intdigest(told)
        return _RECORD.pack(_RECORD_MAGIC, step, after, size, checksum, self._link)

    def follows(self, head: bytes) -> tuple[int, int, int, int] | None:
        """Step, step before, body's length and checksum; None if it is not the next head."""
        magic, step, after, size, checksum, _ = _RECORD.unpack(head)
        if magic != _RECORD_MAGIC or self.head(step, after, size, checksum) != head:
            return None
        return step, after, size, checksum


class RecordHead(NamedTuple):
    step: int
    after: int
    start: int  # of its body
    size: int
    checksum: int


def read_heads(data: memoryview, where: str) -> Iterator[RecordHead]:
    """Of the records of a segment, no body being read, up to one that was not finished: then CorruptData."""
    chain = Chain(unpack_segment_header(data, where))
    at = BLOCK_BYTES
    while at + _RECORD.size <= len(data):
        # no head begins with 0: this is a batch's padding, which may be shorter than a head. It never fills a
        # block: where one begins with 0 something was left out, and nobody looks behind it through gigabytes
        if data[at] == 0 and at % BLOCK_BYTES:
            at = -(-(at + 1) // BLOCK_BYTES) * BLOCK_BYTES
            continue
        told = chain.follows(bytes(data[at : at + _RECORD.size]))
        start = at + _RECORD.size
        if told is None or start + told[2] > len(data) or told[0] > STEP_MAX:
            raise CorruptData(f"read {where} at byte {at}: a record that was not finished")
        step, after, size, checksum = told
        yield RecordHead(step, after, start, size, checksum)
        at = start + size


def unchecked(data: memoryview, head: RecordHead) -> LoggedRecord:
    return LoggedRecord(head.step, head.after, data[head.start : head.start + head.size])


def begin_record(data: memoryview, where: str, head: RecordHead) -> Callable[[], LoggedRecord]:
    """It is checked beside whoever will ask for it: then CorruptData if it is damaged."""
    record = unchecked(data, head)
    checksum = begin_checksum(record.body)

    def whole() -> LoggedRecord:
        if checksum() != head.checksum:
            what = f"the record of step {head.step} is damaged"
            raise CorruptData(f"read {where} at byte {head.start}: {what}")
        return record

    return whole


def read_records(data: memoryview, where: str) -> Iterator[LoggedRecord]:
    """Records of a segment up to the first one that is not whole; then CorruptData, unless it ends there."""
    for head in read_heads(data, where):
        yield begin_record(data, where, head)()
