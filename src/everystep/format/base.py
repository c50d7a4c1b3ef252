"""The documents of a store: run, manifest, base, the index of a part, and the session values of a rank."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec

from everystep.core.census import Census
from everystep.core.dtypes import ELEMENT_TYPES
from everystep.core.events import Presence, Seal
from everystep.core.numbers import (
    STEP_MAX,
    Checksum,
    Digest,
    Natural,
    Rank,
    Step,
    Term,
    Time,
)
from everystep.core.retention import Rules
from everystep.core.tensors import Stored

CHUNK_BYTES = 1 << 20
_SESSION_BYTES = 1 << 30
_NOTHING: Mapping[str, str] = {}


class RunDocument(msgspec.Struct, frozen=True):
    run_id: Digest
    created: str


class Point(msgspec.Struct, frozen=True):
    """A place in the lineage of a run."""

    term: Term
    step: Step


class BaseEntry(msgspec.Struct, frozen=True):
    """What a manifest says of a base; `digest` covers its document byte for byte."""

    step: Step
    digest: Digest
    new_bytes: Natural
    total_bytes: Natural
    time: Time
    metric: float | None = None  # what the user had reported last


class Tag(msgspec.Struct, frozen=True):
    """A name that pins a base. It repeats what a manifest says of the base, so that it leads there also after
    the run was rewound to an earlier step."""

    name: str
    term: Term
    base: BaseEntry


class PassedOver(msgspec.Struct, frozen=True):
    """A term that somebody has decided against, as far as it went then: of another tier, or what
    lies behind the point that a run was taken back to."""

    token: str
    step: Annotated[int, msgspec.Meta(ge=-1, le=STEP_MAX)]  # -1: it held nothing
    # steps up to this one count as before; -2: not even the claim does
    behind: Annotated[int, msgspec.Meta(ge=-2, le=STEP_MAX)] = -2


class Manifest(msgspec.Struct, frozen=True):
    """What counts in one term. Terms before it count only up to the point it continues."""

    run_id: Digest
    term: Term
    continues: Point | None
    host: str
    pid: Natural
    bases: tuple[BaseEntry, ...] = ()
    ancestors: tuple[Point, ...] = ()  # what `continues` continues, and so on back
    dropped: tuple[Point, ...] = ()  # bases of earlier terms that retention has removed
    slimmed: tuple[Point, ...] = ()  # bases of any term of which only the weights are left
    rules: Rules = Rules()  # what this writer keeps
    token: str = ""  # tells this term from one of the same number, claimed on another host
    attach: str = ""  # that its writer served; shadows of one attach may follow each other
    opened: Time = 0.0  # when it was claimed
    lived: Time = 0.0  # seconds from then to when this was written, by a clock that never jumps
    written: Natural = 0  # bytes of bases and log that its writer had written then
    closed: Time = 0.0  # when its trainer ended well; 0: it still lives, or something failed
    over: tuple[PassedOver, ...] = ()


Kind = Literal["weights", "slots", "session", "tail"]


class StoredFile(msgspec.Struct, frozen=True):
    """A file that a base refers to, its own or that of an earlier one. Numbers say where it lies: a name that
    somebody else has written is never used as one."""

    term: Term
    step: Step
    rank: Rank
    kind: Kind
    bytes: Natural
    chunks: tuple[Checksum, ...]  # xxh3-64 of every CHUNK_BYTES, headers included
    root: Natural = 0  # on which disk: options say where it lies, 0 is the run's own directory

    @property
    def identity(self) -> tuple[int, int, int, Kind]:
        """No two files share it, whichever root they lie in."""
        return self.term, self.step, self.rank, self.kind


class PartIndex(msgspec.Struct, frozen=True):
    """What one rank has put into a base."""

    run_id: Digest
    term: Term
    step: Step
    rank: Rank
    files: tuple[StoredFile, ...]
    tensors: tuple[Stored, ...]  # their holders are these files, by number
    session: Natural  # which file holds the SessionValues
    tail: Natural | None  # which file holds the log tail, if any
    tail_steps: Natural


class PartEntry(msgspec.Struct, frozen=True):
    """What a base says of a part; `digest` covers its index byte for byte."""

    rank: Rank
    digest: Digest


class BaseDocument(msgspec.Struct, frozen=True):
    """What all ranks have in common, and their parts, in the order of the ranks."""

    run_id: Digest
    term: Term
    step: Step
    census: Census
    parts: tuple[PartEntry, ...]
    time: Time


class Base(NamedTuple):
    """A base as its documents tell it."""

    document: BaseDocument
    parts: tuple[PartIndex, ...]  # each at the place of its rank

    @property
    def point(self) -> Point:
        return Point(self.document.term, self.document.step)

    @property
    def step(self) -> int:
        return self.document.step

    @property
    def census(self) -> Census:
        return self.document.census

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return tuple(file for part in self.parts for file in part.files)

    @property
    def tensors(self) -> tuple[Stored, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def tail_steps(self) -> int:
        """The last steps, which are still to be replayed."""
        return max(part.tail_steps for part in self.parts)


class SessionValues(msgspec.Struct, frozen=True):
    """Everything of a step that is not a tensor of an atom, as one rank has it."""

    step: Step
    rng: bytes
    state: bytes
    groups: tuple[bytes, ...]
    values: tuple[tuple[Natural, Natural, bytes], ...]  # atom, optimizer, encoded slot values
    metric: float | None = None
    pending: Presence = Presence()


def session_bytes_max(census: Census) -> int:
    """No base has more of them: a copy or two of the model, and what a training remembers beside it."""
    return _SESSION_BYTES + 4 * sum(atom.bytes for atom in census.atoms)


def after_seal(session: SessionValues, seal: Seal) -> SessionValues:
    """What a record's seal leaves: what it does not say is as it was before."""
    groups = tuple(
        new or (session.groups[i] if i < len(session.groups) else b"")
        for i, new in enumerate(seal.groups)
    )
    state = seal.state or session.state
    return SessionValues(
        seal.step, seal.rng, state, groups, session.values, seal.metric, seal.pending
    )


def without_slots(base: Base) -> Base:
    """What is left of a base whose optimizer slots were removed."""
    return base._replace(parts=tuple(map(_weights_of, base.parts)))


def _weights_of(part: PartIndex) -> PartIndex:
    tensors = [t for t in part.tensors if not t.slot]
    used = sorted({part.session, *(t.place.holder for t in tensors)})
    renumbered = {old: new for new, old in enumerate(used)}
    return msgspec.structs.replace(
        part,
        files=tuple(part.files[i] for i in used),
        tensors=tuple(t.at(t.place.held_by(renumbered[t.place.holder])) for t in tensors),
        session=renumbered[part.session],
    )


def safetensors_header(
    tensors: list[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] = _NOTHING
) -> bytes:
    """Header of a safetensors file with tensors (name, dtype, shape, bytes) laid out in order.

    Written by hand because the data behind it is streamed and checksummed on its way to the disk.
    """
    cursor = 0
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", "writer": "everystep", **metadata}
    }
    for name, dtype, shape, size in tensors:
        code = ELEMENT_TYPES[dtype].code
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [cursor, cursor + size]}
        cursor += size
    text = msgspec.json.encode(header)
    text += b" " * (-(len(text) + 8) % 64)
    return struct.pack("<Q", len(text)) + text
