"""Writing one base: what is new of a snapshot, its index, then the document of the base."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from everystep.core.census import Census
from everystep.core.dtypes import ELEMENT_TYPES
from everystep.core.tensors import Held, Span, Stored
from everystep.errors import StoreError
from everystep.format.base import (
    CHUNK_BYTES,
    Base,
    BaseDocument,
    BaseEntry,
    Kind,
    PartEntry,
    PartIndex,
    SessionValues,
    StoredFile,
    safetensors_header,
    session_bytes_max,
)
from everystep.format.document import pack_document
from everystep.store import layout
from everystep.store.disk.commit import Turn, at_once, crash_point, write_blocks
from everystep.store.disk.files import make_folder, sync_folder

_INDEX_BYTES, _TENSOR_BYTES = 16 << 10, 512


class Snapshot(NamedTuple):
    """A consistent state of one rank, to be written; nobody changes its bytes meanwhile."""

    step: int
    census: Census
    tensors: list[Held]
    session: SessionValues
    tail: bytes
    tail_steps: int
    rank: int = 0


def new_bytes(snapshot: Snapshot, previous: Base | None) -> int:
    """About what `write_base` would write."""
    known = {t.key for t in _reuse(snapshot, previous)[1]}
    data = sum(len(t.data) for t in snapshot.tensors if t.key not in known)
    session = msgspec.msgpack.encode(snapshot.session)
    # names and places of tensors, and the checksums of chunks
    index = _INDEX_BYTES + len(snapshot.tensors) * _TENSOR_BYTES + data // CHUNK_BYTES * 20
    return data + len(session) + len(snapshot.tail) + index


def write_base(
    run: Path,
    run_id: str,
    term: int,
    snapshot: Snapshot,
    previous: Base | None,
    turn: Turn = at_once,
) -> tuple[BaseEntry, Base]:
    """Put a snapshot on the disk, synced. It counts only once a manifest names it.

    Tensors that have not changed since `previous` are referred to, not written.
    """
    step = snapshot.step
    part, index, new = _write_part(run, run_id, term, snapshot, previous, turn)
    document = BaseDocument(run_id, term, step, snapshot.census, (part,), time.time())
    data = pack_document("base", document)
    write_blocks(layout.document_path(run, term, step), [data], turn)
    sync_folder(layout.base_dir(run, term, step))
    crash_point("base_written")
    base = Base(document, (index,))
    entry = BaseEntry(
        step,
        xxhash.xxh3_128_hexdigest(data),
        new + len(data),
        sum(file.bytes for file in base.files),
        document.time,
        _finite(snapshot.session.metric),
    )
    return entry, base


def _write_part(
    run: Path, run_id: str, term: int, snapshot: Snapshot, previous: Base | None, turn: Turn
) -> tuple[PartEntry, PartIndex, int]:
    """The data of one rank, then its index; and how many bytes are new."""
    step, rank = snapshot.step, snapshot.rank
    folder = layout.part_dir(run, term, step, rank)
    make_folder(folder, below=layout.term_dir(run, term))
    write = _Files(run, term, step, rank, turn)
    crash_point("base_begun")
    write.files, tensors = _reuse(snapshot, previous)
    known = {t.key for t in tensors}
    fresh = [t for t in snapshot.tensors if t.key not in known]
    before = len(write.files)
    weights, slots = [t for t in fresh if not t.slot], [t for t in fresh if t.slot]
    tensors += write.tensors("weights", weights, snapshot.census) if weights else []
    tensors += write.tensors("slots", slots, snapshot.census) if slots else []
    session = write.file("session", [_encoded(snapshot)])
    tail = write.file("tail", [snapshot.tail]) if snapshot.tail else None
    crash_point("data_synced")
    index = PartIndex(
        run_id=run_id,
        term=term,
        step=step,
        rank=rank,
        files=tuple(write.files),
        tensors=tuple(tensors),
        session=session,
        tail=tail,
        tail_steps=snapshot.tail_steps,
    )
    data = pack_document("part", index)
    write_blocks(folder / layout.INDEX, [data], turn)
    sync_folder(folder)
    crash_point("index_written")
    new = len(data) + sum(file.bytes for file in write.files[before:])
    return PartEntry(rank, xxhash.xxh3_128_hexdigest(data)), index, new


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


def _reuse(snapshot: Snapshot, previous: Base | None) -> tuple[list[StoredFile], list[Stored]]:
    """What is there already, whichever rank has written it."""
    if previous is None or previous.census.atoms != snapshot.census.atoms:
        return [], []
    stored = {
        t.key: (t, part.files[t.place.holder]) for part in previous.parts for t in part.tensors
    }
    kept = [
        (old, file)
        for t in snapshot.tensors
        for old, file in [stored.get(t.key, (None, None))]
        if old and file
        if (old.version, old.dtype, old.shape) == (t.version, t.dtype, t.shape)
    ]
    files = {file.identity: file for _, file in kept}
    numbers = {identity: number for number, identity in enumerate(files)}
    tensors = [t.at(t.place.held_by(numbers[file.identity])) for t, file in kept]
    return list(files.values()), tensors


class _Files:
    """The files of a base that is written, and those of earlier ones that it refers to."""

    def __init__(self, run: Path, term: int, step: int, rank: int, turn: Turn) -> None:
        self._run, self._turn = run, turn
        self._term, self._step, self._rank = term, step, rank
        self.files: list[StoredFile] = []

    def file(self, kind: Kind, blocks: Iterable[bytes | memoryview]) -> int:
        folder = layout.part_dir(self._run, self._term, self._step, self._rank)
        size, chunks = write_blocks(folder / layout.NAMES[kind], blocks, self._turn)
        self.files.append(StoredFile(self._term, self._step, self._rank, kind, size, chunks))
        return len(self.files) - 1

    def tensors(self, kind: Kind, tensors: list[Held], census: Census) -> list[Stored]:
        # widest elements first keeps every tensor aligned, as safetensors asks for
        tensors = sorted(tensors, key=lambda t: -ELEMENT_TYPES[t.dtype].bytes)
        header = safetensors_header(
            [(_tensor_name(census, t), t.dtype, t.shape, len(t.data)) for t in tensors]
        )
        file = self.file(kind, [header, *(t.data for t in tensors)])
        stored, at = [], len(header)
        for t in tensors:
            size = len(t.data)
            stored.append(t.at(Span(file, at, size)))
            at += size
        return stored


def _tensor_name(census: Census, tensor: Held) -> str:
    name = census.atoms[tensor.atom].name
    return f"{name}:{tensor.slot.strip('/')}" if tensor.slot else name
