"""Reading one base. No byte is given out whose chunk was not checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from everystep.core.tensors import Held
from everystep.errors import CorruptData
from everystep.format.base import (
    CHUNK_BYTES,
    Base,
    BaseDocument,
    PartIndex,
    SessionValues,
    StoredFile,
    without_slots,
)
from everystep.format.checks import check_base, check_document, check_session
from everystep.format.contents import check_session_contents
from everystep.format.document import MALFORMED, unpack_document
from everystep.format.entry import check_entries
from everystep.store import layout
from everystep.store.disk.files import RunPath, look_at, read_file
from everystep.store.disk.mapped import map_file, read_ahead
from everystep.store.disk.scan import scan
from everystep.store.interrupt import stop_if_asked
from everystep.store.runs import Candidate

_CHECKED_BYTES = 32 << 20  # a whole number of chunks
_T = TypeVar("_T")


def read_document(run: Path, candidate: Candidate) -> BaseDocument:
    """What describes a committed base, checked against the manifest that names it."""
    term, step = candidate.term, candidate.entry.step
    path = layout.document_path(run, term, step)
    document = _read(path, "base", BaseDocument, candidate.entry.digest)
    if (document.term, document.step) != (term, step):
        raise CorruptData(f"read {path}: it is of step {document.step}, term {document.term}")
    check_document(document, str(path))
    return document


def read_base(run: Path, candidate: Candidate) -> Base:
    """The same with the indexes of all parts."""
    term, step = candidate.term, candidate.entry.step
    document = read_document(run, candidate)
    parts = []
    for entry in document.parts:
        path = layout.index_path(run, term, step, entry.rank)
        part = _read(path, "part", PartIndex, entry.digest)
        if (part.term, part.step, part.rank) != (term, step, entry.rank):
            told = f"step {part.step}, term {part.term}, rank {part.rank}"
            raise CorruptData(f"read {path}: it is the index of {told}")
        parts.append(part)
    base = Base(document, tuple(parts))
    check_base(base, str(layout.base_dir(run, term, step)))
    return without_slots(base) if candidate.weights_only else base


def _read(path: RunPath, kind: str, type: type[_T], digest: str) -> _T:
    try:
        data = read_file(path)
    except OSError as error:
        raise CorruptData(f"read {path}: {error.strerror}") from error
    document = unpack_document(kind, data, type, str(path))
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise CorruptData(f"read {path}: it is not the one whose digest is named")
    return document


class BaseReader:
    """An open base: every file mapped, every chunk checked before the first byte is given out."""

    def __init__(self, run: Path, base: Base, *, threads: int = 1) -> None:
        self.base = base
        self._views = [
            [open_checked(run, file, threads=threads) for file in part.files] for part in base.parts
        ]

    def tensors(self) -> Iterator[Held]:
        for part, views in zip(self.base.parts, self._views, strict=True):
            for tensor in part.tensors:
                yield tensor.at(tensor.place.of(views[tensor.place.holder]))

    def session(self, rank: int = 0) -> SessionValues:
        data = self._views[rank][self.base.parts[rank].session]
        return unpack_session(data, self.base)

    def tail(self, rank: int = 0) -> memoryview:
        place = self.base.parts[rank].tail
        if place is None:
            return memoryview(b"")
        check_tail(self._views[rank][place], self.base)
        return self._views[rank][place]


def unpack_session(data: bytes | memoryview, base: Base) -> SessionValues:
    where = f"base {base.step}"
    try:
        session = msgspec.msgpack.decode(data, type=SessionValues)
    except MALFORMED as error:
        raise CorruptData(f"read {where}: session values: {error}") from error
    check_session(session, base.step, base.census, where)
    check_session_contents(session, base.census, where)
    return session


def check_small_files(base: Base, read: Callable[[StoredFile], bytes | memoryview]) -> None:
    """What a base says beside its tensors, as far as it can be looked at without a model."""
    for part in base.parts:
        unpack_session(read(part.files[part.session]), base)
        if part.tail is not None:
            check_tail(memoryview(read(part.files[part.tail])), base)


def check_tail(tail: memoryview, base: Base) -> None:
    check_entries(tail, base.census, f"base {base.step}: log tail")


def open_checked(run: Path, file: StoredFile, *, threads: int = 1) -> memoryview:
    """Map a stored file and check its length and every chunk."""
    path = layout.file_path(run, file)
    view = map_file(path)
    if len(view) != file.bytes or len(file.chunks) != -(-len(view) // CHUNK_BYTES):
        raise CorruptData(f"read {path}: {len(view)} bytes, the index says {file.bytes}")
    read_ahead(view, 0, len(view))
    if threads == 1 or len(view) <= _CHECKED_BYTES:
        check_chunks(view, 0, file, f"read {path}")
        return view
    starts = range(0, len(view), _CHECKED_BYTES)
    with ThreadPoolExecutor(threads, "everystep-check") as pool:
        parts = [(view[at : at + _CHECKED_BYTES], at, file, f"read {path}") for at in starts]
        for checked in [pool.submit(check_chunks, *part) for part in parts]:
            checked.result()
    return view


def check_length(run: Path, file: StoredFile) -> None:
    """That it is there and as long as it should be; nothing of it is read."""
    path = layout.file_path(run, file)
    try:
        found = look_at(path)
    except OSError as error:
        raise CorruptData(f"look at {path}: {error.strerror}") from error
    if found is None or found.st_size != file.bytes:
        what = "it is not there" if found is None else f"{found.st_size} bytes"
        raise CorruptData(f"look at {path}: {what}, the index says {file.bytes} bytes")


def check_file(run: Path, file: StoredFile, tick: Callable[[], None] = lambda: None) -> None:
    """The same of what the disk holds; nothing of it is kept. `tick` is called now and then."""
    path = layout.file_path(run, file)
    if len(file.chunks) != -(-file.bytes // CHUNK_BYTES):
        raise CorruptData(f"read {path}: {len(file.chunks)} chunks for {file.bytes} bytes")

    def look(part: memoryview, at: int) -> None:
        check_chunks(part, at, file, f"read {path}")
        tick()

    scan(path, file.bytes, look)


def check_chunks(part: memoryview, at: int, file: StoredFile, operation: str) -> None:
    """Compare a part of a file that begins at a whole chunk with what the index says of it."""
    for i in range(0, len(part), CHUNK_BYTES):
        stop_if_asked()
        found = xxhash.xxh3_64_hexdigest(part[i : i + CHUNK_BYTES])
        expected = file.chunks[(at + i) // CHUNK_BYTES]
        if found != expected:
            raise CorruptData(
                f"{operation} at byte {at + i}: chunk checksum {found}, the index says {expected}",
                hint="this base is damaged and will be skipped; everystep verify lists what is left",
            )
