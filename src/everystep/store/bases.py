"""Writing and reading one base. A reader hands out no byte whose chunk it has not checked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from everystep.core.census import Census
from everystep.core.dtypes import ELEMENT_TYPES
from everystep.errors import CorruptData, StoreError
from everystep.format.base import (
    CHUNK_BYTES,
    BaseEntry,
    BaseIndex,
    Part,
    SessionValues,
    StoredFile,
    StoredTensor,
    safetensors_header,
    session_bytes_max,
    without_slots,
)
from everystep.format.checks import check_index, check_session
from everystep.format.contents import check_session_contents
from everystep.format.document import MALFORMED, pack_document, unpack_document
from everystep.format.entry import check_entries
from everystep.store import layout
from everystep.store.commit import Turn, at_once, crash_point, write_blocks
from everystep.store.files import look_at, make_folder, read_file, sync_folder
from everystep.store.interrupt import stop_if_asked
from everystep.store.mapped import map_file, read_ahead
from everystep.store.runs import Candidate
from everystep.store.scan import scan

_INDEX_BYTES, _TENSOR_BYTES = 16 << 10, 512
_CHECKED_BYTES = 32 << 20  # a whole number of chunks


class SnapshotTensor(NamedTuple):
    atom: int
    slot: str
    dtype: str
    shape: tuple[int, ...]
    version: int
    data: memoryview


class Snapshot(NamedTuple):
    """A consistent state to be written; nobody changes its bytes meanwhile."""

    step: int
    census: Census
    tensors: list[SnapshotTensor]
    session: SessionValues
    tail: bytes
    tail_steps: int


def new_bytes(snapshot: Snapshot, previous: BaseIndex | None) -> int:
    """About what `write_base` would write."""
    known = {(t.atom, t.slot) for t in _reuse(snapshot, previous)[1]}
    data = sum(len(t.data) for t in snapshot.tensors if (t.atom, t.slot) not in known)
    session = msgspec.msgpack.encode(snapshot.session)
    # names and places of tensors, and the checksums of chunks
    index = _INDEX_BYTES + len(snapshot.tensors) * _TENSOR_BYTES + data // CHUNK_BYTES * 20
    return data + len(session) + len(snapshot.tail) + index


def write_base(
    run: Path,
    run_id: str,
    term: int,
    snapshot: Snapshot,
    previous: BaseIndex | None,
    turn: Turn = at_once,
) -> tuple[BaseEntry, BaseIndex]:
    """Put a snapshot on the disk, synced. It counts only once a manifest names it.

    Tensors that have not changed since `previous` are referred to, not written.
    """
    folder = layout.base_dir(run, term, snapshot.step)
    make_folder(folder, below=layout.term_dir(run, term))
    write = _Files(run, term, snapshot.step, turn)
    crash_point("base_begun")
    write.files, tensors = _reuse(snapshot, previous)
    known = {(t.atom, t.slot) for t in tensors}
    fresh = [t for t in snapshot.tensors if (t.atom, t.slot) not in known]
    before = len(write.files)
    weights, slots = [t for t in fresh if not t.slot], [t for t in fresh if t.slot]
    tensors += write.tensors("weights", weights, snapshot.census) if weights else []
    tensors += write.tensors("slots", slots, snapshot.census) if slots else []
    session = write.file("session", [_encoded(snapshot)])
    tail = write.file("tail", [snapshot.tail]) if snapshot.tail else None
    crash_point("data_synced")
    index = BaseIndex(
        run_id=run_id,
        term=term,
        step=snapshot.step,
        census=snapshot.census,
        files=tuple(write.files),
        tensors=tuple(tensors),
        session=session,
        tail=tail,
        tail_steps=snapshot.tail_steps,
        time=time.time(),
    )
    data = pack_document("base", index)
    write_blocks(folder / layout.INDEX, [data], turn)
    sync_folder(folder)
    crash_point("index_written")
    new_bytes = len(data) + sum(file.bytes for file in write.files[before:])
    entry = BaseEntry(
        snapshot.step,
        xxhash.xxh3_128_hexdigest(data),
        new_bytes,
        sum(f.bytes for f in write.files),
        index.time,
        _finite(snapshot.session.metric),
    )
    return entry, index


def _encoded(snapshot: Snapshot) -> bytes:
    """Its session values; a base that nobody would read again is not written."""
    data, most = msgspec.msgpack.encode(snapshot.session), session_bytes_max(snapshot.census)
    if len(data) > most:
        raise StoreError(
            f"write a base of step {snapshot.step}: {len(data)} bytes of state beside the model's tensors, "
            f"expected at most {most}",
            hint="give attach less in state=: what is large and does not change can be made again",
        )
    return data


def _finite(metric: float | None) -> float | None:
    """JSON has no other numbers, and no other is ever the best."""
    return metric if metric is not None and math.isfinite(metric) else None


def _reuse(
    snapshot: Snapshot, previous: BaseIndex | None
) -> tuple[list[StoredFile], list[StoredTensor]]:
    if previous is None or previous.census.atoms != snapshot.census.atoms:
        return [], []
    stored = {(t.atom, t.slot): t for t in previous.tensors}
    kept = [
        old
        for t in snapshot.tensors
        if (old := stored.get((t.atom, t.slot)))
        and (old.version, old.dtype, old.shape) == (t.version, t.dtype, t.shape)
    ]
    used = sorted({t.file for t in kept})
    renumbered = {old: new for new, old in enumerate(used)}
    files = [previous.files[i] for i in used]
    return files, [msgspec.structs.replace(t, file=renumbered[t.file]) for t in kept]


class _Files:
    """The files of a base that is written, and those of earlier ones that it refers to."""

    def __init__(self, run: Path, term: int, step: int, turn: Turn) -> None:
        self._run, self._term, self._step, self._turn = run, term, step, turn
        self.files: list[StoredFile] = []

    def file(self, part: Part, blocks: Iterable[bytes | memoryview]) -> int:
        path = layout.base_dir(self._run, self._term, self._step) / layout.NAMES[part]
        size, chunks = write_blocks(path, blocks, self._turn)
        self.files.append(StoredFile(self._term, self._step, part, size, chunks))
        return len(self.files) - 1

    def tensors(
        self, part: Part, tensors: list[SnapshotTensor], census: Census
    ) -> list[StoredTensor]:
        # widest elements first keeps every tensor aligned, as safetensors asks for
        tensors = sorted(tensors, key=lambda t: -ELEMENT_TYPES[t.dtype].bytes)
        header = safetensors_header(
            [(_tensor_name(census, t), t.dtype, t.shape, len(t.data)) for t in tensors]
        )
        file = self.file(part, [header, *(t.data for t in tensors)])
        stored, at = [], len(header)
        for t in tensors:
            size = len(t.data)
            stored.append(StoredTensor(t.atom, t.slot, t.dtype, t.shape, t.version, file, at, size))
            at += size
        return stored


def _tensor_name(census: Census, tensor: SnapshotTensor) -> str:
    name = census.atoms[tensor.atom].name
    return f"{name}:{tensor.slot.strip('/')}" if tensor.slot else name


def read_index(run: Path, candidate: Candidate) -> BaseIndex:
    """The index of a committed base, checked against the manifest that names it."""
    path = layout.index_path(run, candidate.term, candidate.entry.step)
    try:
        data = read_file(path)
    except OSError as error:
        raise CorruptData(f"read {path}: {error.strerror}") from error
    index = unpack_document("base", data, BaseIndex, str(path))
    if xxhash.xxh3_128_hexdigest(data) != candidate.entry.digest:
        raise CorruptData(f"read {path}: it is not the index that the manifest names")
    if (index.term, index.step) != (candidate.term, candidate.entry.step):
        raise CorruptData(f"read {path}: it is the index of step {index.step}, term {index.term}")
    check_index(index, str(path))
    return without_slots(index) if candidate.weights_only else index


class BaseReader:
    """An open base: every file mapped, every chunk checked before the first byte is given out."""

    def __init__(self, run: Path, index: BaseIndex, *, threads: int = 1) -> None:
        self.index = index
        self._views = [open_checked(run, file, threads=threads) for file in index.files]

    def tensor(self, tensor: StoredTensor) -> memoryview:
        return self._views[tensor.file][tensor.at : tensor.at + tensor.bytes]

    @property
    def session(self) -> SessionValues:
        return unpack_session(self._views[self.index.session], self.index)

    @property
    def tail(self) -> memoryview:
        if self.index.tail is None:
            return memoryview(b"")
        tail = self._views[self.index.tail]
        check_tail(tail, self.index)
        return tail


def unpack_session(data: bytes | memoryview, index: BaseIndex) -> SessionValues:
    where = f"base {index.step}"
    try:
        session = msgspec.msgpack.decode(data, type=SessionValues)
    except MALFORMED as error:
        raise CorruptData(f"read {where}: session values: {error}") from error
    check_session(session, index, where)
    check_session_contents(session, index.census, where)
    return session


def check_small_files(index: BaseIndex, read: Callable[[StoredFile], bytes | memoryview]) -> None:
    """What a base says beside its tensors, as far as it can be looked at without a model."""
    unpack_session(read(index.files[index.session]), index)
    if index.tail is not None:
        check_tail(memoryview(read(index.files[index.tail])), index)


def check_tail(tail: memoryview, index: BaseIndex) -> None:
    check_entries(tail, index.census, f"base {index.step}: log tail")


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
                f"{operation} at byte {at + i}: chunk checksum {found}, index says {expected}",
                hint="this base is damaged and will be skipped; everystep verify lists what is left",
            )
