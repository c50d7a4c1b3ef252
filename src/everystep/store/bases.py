"""Writing and reading one base. A reader hands out no byte whose chunk it has not checked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from everystep.core.census import Census
from everystep.core.dtypes import ELEMENT_TYPES
from everystep.errors import CorruptData
from everystep.format.base import (
    CHUNK_BYTES,
    BaseEntry,
    BaseIndex,
    SessionValues,
    StoredFile,
    StoredTensor,
    safetensors_header,
    without_slots,
)
from everystep.format.document import pack_document, unpack_document
from everystep.store import layout
from everystep.store.commit import (
    Turn,
    at_once,
    crash_point,
    make_dirs_in,
    sync_dir,
    write_blocks,
)
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
    epoch: int,
    snapshot: Snapshot,
    previous: BaseIndex | None,
    turn: Turn = at_once,
) -> tuple[BaseEntry, BaseIndex]:
    """Put a snapshot on the disk, synced. It counts only once a manifest names it.

    Tensors that have not changed since `previous` are referred to, not written.
    """
    folder = layout.base_dir(run, epoch, snapshot.step)
    make_dirs_in(layout.epoch_dir(run, epoch), folder)
    crash_point("base_begun")
    files, tensors = _reuse(snapshot, previous)
    known = {(t.atom, t.slot) for t in tensors}
    fresh = [t for t in snapshot.tensors if (t.atom, t.slot) not in known]
    before = len(files)
    for name, part in (
        (layout.WEIGHTS, [t for t in fresh if not t.slot]),
        (layout.SLOTS, [t for t in fresh if t.slot]),
    ):
        if part:
            tensors += _write_tensors(run, folder / name, part, snapshot.census, files, turn)
    values = msgspec.msgpack.encode(snapshot.session)
    session = _write_file(run, folder / layout.SESSION, [values], files, turn)
    tail = None
    if snapshot.tail:
        tail = _write_file(run, folder / layout.TAIL, [snapshot.tail], files, turn)
    crash_point("data_synced")
    index = BaseIndex(
        run_id=run_id,
        epoch=epoch,
        step=snapshot.step,
        census=snapshot.census,
        files=tuple(files),
        tensors=tuple(tensors),
        session=session,
        tail=tail,
        tail_steps=snapshot.tail_steps,
        time=time.time(),
    )
    data = pack_document("base", index)
    write_blocks(folder / layout.INDEX, [data], turn)
    sync_dir(folder)
    crash_point("index_written")
    new_bytes = len(data) + sum(file.bytes for file in files[before:])
    entry = BaseEntry(
        snapshot.step,
        xxhash.xxh3_128_hexdigest(data),
        new_bytes,
        sum(f.bytes for f in files),
        index.time,
        _finite(snapshot.session.metric),
    )
    return entry, index


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


def _write_tensors(
    run: Path,
    path: Path,
    part: list[SnapshotTensor],
    census: Census,
    files: list[StoredFile],
    turn: Turn,
) -> list[StoredTensor]:
    # widest elements first keeps every tensor aligned, as safetensors asks for
    part = sorted(part, key=lambda t: -ELEMENT_TYPES[t.dtype].bytes)
    header = safetensors_header(
        [(_tensor_name(census, t), t.dtype, t.shape, len(t.data)) for t in part]
    )
    file = _write_file(run, path, [header, *(t.data for t in part)], files, turn)
    stored, cursor = [], len(header)
    for t in part:
        stored.append(
            StoredTensor(t.atom, t.slot, t.dtype, t.shape, t.version, file, cursor, len(t.data))
        )
        cursor += len(t.data)
    return stored


def _tensor_name(census: Census, tensor: SnapshotTensor) -> str:
    name = census.atoms[tensor.atom].name
    return f"{name}:{tensor.slot.strip('/')}" if tensor.slot else name


def _write_file(
    run: Path,
    path: Path,
    blocks: Iterable[bytes | memoryview],
    files: list[StoredFile],
    turn: Turn,
) -> int:
    size, chunks = write_blocks(path, blocks, turn)
    files.append(StoredFile(str(path.relative_to(run)), size, chunks))
    return len(files) - 1


def read_index(run: Path, candidate: Candidate) -> BaseIndex:
    """The index of a committed base, checked against the manifest that names it."""
    path = layout.base_dir(run, candidate.epoch, candidate.entry.step) / layout.INDEX
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptData(f"read {path}: {error.strerror}") from error
    index = unpack_document("base", data, BaseIndex, str(path))
    if xxhash.xxh3_128_hexdigest(data) != candidate.entry.digest:
        raise CorruptData(f"read {path}: it is not the index that the manifest names")
    return without_slots(index) if candidate.weights_only else index


class BaseReader:
    """An open base: every file mapped, every chunk checked before the first byte is given out."""

    def __init__(self, run: Path, index: BaseIndex, *, threads: int = 1) -> None:
        self.index = index
        self._views = [open_checked(run, file, threads=threads) for file in index.files]
        for tensor in index.tensors:
            if tensor.at + tensor.bytes > index.files[tensor.file].bytes:
                raise CorruptData(f"base {index.step}: a tensor ends behind its file")

    def tensor(self, tensor: StoredTensor) -> memoryview:
        return self._views[tensor.file][tensor.at : tensor.at + tensor.bytes]

    @property
    def session(self) -> SessionValues:
        try:
            return msgspec.msgpack.decode(self._views[self.index.session], type=SessionValues)
        except msgspec.DecodeError as error:
            raise CorruptData(f"base {self.index.step}: session values: {error}") from error

    @property
    def tail(self) -> memoryview:
        return memoryview(b"") if self.index.tail is None else self._views[self.index.tail]


def open_checked(run: Path, file: StoredFile, *, threads: int = 1) -> memoryview:
    """Map a stored file and check its length and every chunk."""
    path = run / file.path
    view = map_file(path)
    read_ahead(view, 0, len(view))
    if len(view) != file.bytes or len(file.chunks) != -(-len(view) // CHUNK_BYTES):
        raise CorruptData(f"read {path}: {len(view)} bytes, the index says {file.bytes}")
    if threads == 1 or len(view) <= _CHECKED_BYTES:
        check_chunks(view, 0, file, f"read {path}")
        return view
    starts = range(0, len(view), _CHECKED_BYTES)
    with ThreadPoolExecutor(threads, "everystep-check") as pool:
        parts = [(view[at : at + _CHECKED_BYTES], at, file, f"read {path}") for at in starts]
        for checked in [pool.submit(check_chunks, *part) for part in parts]:
            checked.result()
    return view


def check_file(run: Path, file: StoredFile) -> None:
    """The same of what the disk holds; nothing of it is kept."""
    path = run / file.path
    if len(file.chunks) != -(-file.bytes // CHUNK_BYTES):
        raise CorruptData(f"read {path}: {len(file.chunks)} chunks for {file.bytes} bytes")
    scan(path, file.bytes, lambda part, at: check_chunks(part, at, file, f"read {path}"))


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
