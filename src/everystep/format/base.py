"""The documents of a store: run, manifest, base index, and the session values of a base."""

from __future__ import annotations

import struct

import msgspec

from everystep.core.census import Census
from everystep.core.dtypes import ELEMENT_TYPES
from everystep.core.events import Seal

CHUNK_BYTES = 1 << 20


class RunDocument(msgspec.Struct, frozen=True):
    run_id: str
    created: str


class Point(msgspec.Struct, frozen=True):
    """A place in the lineage of a run."""

    epoch: int
    step: int


class BaseEntry(msgspec.Struct, frozen=True):
    """What a manifest says of a base; `digest` covers the index file byte for byte."""

    step: int
    digest: str
    new_bytes: int
    total_bytes: int
    time: float


class Manifest(msgspec.Struct, frozen=True):
    """What counts in one epoch. Epochs before it count only up to the point it continues."""

    run_id: str
    epoch: int
    continues: Point | None
    host: str
    pid: int
    bases: tuple[BaseEntry, ...] = ()
    ancestors: tuple[Point, ...] = ()  # what `continues` continues, and so on back
    dropped: tuple[Point, ...] = ()  # bases of earlier epochs that retention has removed
    opened: float = 0.0  # when it was claimed
    closed: float = 0.0  # when its trainer ended well; 0: it still lives, or something failed


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a base; `path` is relative to the run, so a later base may refer to it."""

    path: str
    bytes: int
    chunks: tuple[str, ...]  # xxh3-64 of every CHUNK_BYTES, headers included


class StoredTensor(msgspec.Struct, frozen=True):
    """Where one tensor of an atom lies; `version` is the step its bytes belong to."""

    atom: int
    slot: str
    dtype: str
    shape: tuple[int, ...]
    version: int
    file: int
    at: int
    bytes: int


class BaseIndex(msgspec.Struct, frozen=True):
    run_id: str
    epoch: int
    step: int
    census: Census
    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]
    session: int  # which file holds the SessionValues
    tail: int | None  # which file holds the log tail, if any
    tail_steps: int
    time: float


class SessionValues(msgspec.Struct, frozen=True):
    """Everything of a step that is not a tensor of an atom."""

    step: int
    rng: bytes
    state: bytes
    groups: tuple[bytes, ...]
    values: tuple[tuple[int, int, bytes], ...]  # atom, optimizer, encoded slot values


def after_seal(session: SessionValues, seal: Seal) -> SessionValues:
    """What a record's seal leaves: what it does not say is as it was before."""
    groups = tuple(
        new or (session.groups[i] if i < len(session.groups) else b"")
        for i, new in enumerate(seal.groups)
    )
    return SessionValues(seal.step, seal.rng, seal.state or session.state, groups, session.values)


def safetensors_header(tensors: list[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Header of a safetensors file with tensors (name, dtype, shape, bytes) laid out in order.

    Written by hand because the data behind it is streamed and checksummed on its way to the disk.
    """
    cursor = 0
    header: dict[str, object] = {"__metadata__": {"format": "pt", "writer": "everystep"}}
    for name, dtype, shape, size in tensors:
        code = ELEMENT_TYPES[dtype].code
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [cursor, cursor + size]}
        cursor += size
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text
