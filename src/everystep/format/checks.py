"""What a stored document says is held against itself here, once, when it has been decoded: before memory is
made, a file is opened or anything live is changed because of it.

A checksum tells that bytes are what somebody wrote, not that this somebody was us.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from everystep.core.census import ALIGN_BYTES, Census, align
from everystep.core.dtypes import ELEMENT_TYPES, tensor_bytes
from everystep.core.events import (
    AMP_BYTES,
    GRADIENT,
    Call,
    Edit,
    Event,
    Fingerprints,
    Planes,
    Presence,
    Rebase,
    Seal,
    SlotValues,
    Sparse,
    presence_bytes,
)
from everystep.core.regions import whole
from everystep.core.tensors import Stored
from everystep.errors import CorruptData, UnknownVersion
from everystep.format.base import (
    CHUNK_BYTES,
    Base,
    BaseDocument,
    Manifest,
    PartIndex,
    SessionValues,
    StoredFile,
    session_bytes_max,
)

_CALLS_DISCARDED_MAX = 4  # of each optimizer, whose gradients a payload keeps room for
_SLICE_BYTES_MAX = 16 << 20  # of a base, which a payload may have had to give up


class _Wrong(Exception):
    """What contradicts itself, in words."""


def check_manifest(manifest: Manifest, where: str) -> None:
    """Terms go back, steps go on, and nothing is named twice."""
    points = [p for p in (manifest.continues, *manifest.ancestors) if p]
    terms = [manifest.term, *(point.term for point in points)]
    steps = [entry.step for entry in manifest.bases]
    if any(after <= before for after, before in pairwise(terms)):
        raise CorruptData(f"read {where}: it continues a term that is not before it: {terms}")
    if any(after <= before for before, after in pairwise(steps)):
        raise CorruptData(f"read {where}: its bases are of steps {steps}, expected rising ones")


def check_document(document: BaseDocument, where: str) -> None:
    """Before the parts that it names are looked for."""
    ranks = [part.rank for part in document.parts]
    if not ranks or ranks != [*range(len(ranks))]:
        raise CorruptData(f"read {where}: parts of ranks {ranks[:10]}, expected all from 0 on")
    if len(ranks) > 1:
        raise UnknownVersion(
            f"read {where}: a base of {len(ranks)} ranks, this everystep knows those of one",
            hint="upgrade everystep to the version that wrote this run",
        )


def check_base(base: Base, where: str) -> None:
    """Every atom lies whole in one part."""
    try:
        _check_census(base.census)
        seen: set[tuple[int, str]] = set()
        for part in base.parts:
            _check_index(part, base.census, seen)
        for atom, described in enumerate(base.census.atoms):
            if (atom, "") not in seen:
                raise _Wrong(f"no value of {described.name!r}")
    except _Wrong as wrong:
        raise CorruptData(f"read {where}: {wrong}") from None


def _check_index(part: PartIndex, census: Census, seen: set[tuple[int, str]]) -> None:
    _check_files(part, census)
    by_file: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for tensor in part.tensors:
        _check_tensor(tensor, part, census)
        _once((tensor.atom, tensor.slot), seen, "tensor")
        place = tensor.place
        by_file[place.holder].append((place.at, place.at + place.bytes))
    for ranges in by_file.values():
        _check_apart(ranges)


def check_session(session: SessionValues, step: int, census: Census, where: str) -> None:
    """`step`: of the base that it belongs to."""
    try:
        if session.step != step:
            raise _Wrong(f"values of step {session.step} in a base of step {step}")
        if len(session.groups) != len(census.optimizers):
            raise _Wrong(f"{len(session.groups)} groups, expected {len(census.optimizers)}")
        _check_pending(session.pending, census)
        for atom, optimizer, _ in session.values:
            _check_owner(census, atom, optimizer)
    except _Wrong as wrong:
        raise CorruptData(f"read {where}: session values: {wrong}") from None


def check_entry(events: Sequence[Event], stored_bytes: int, census: Census, where: str) -> None:
    """The events of one entry of a log or a tail, and the bytes behind them."""
    first = events[0] if events else None
    packed = isinstance(first, Sparse | Planes)
    rest = events[1:] if packed else events
    try:
        for event in rest:
            _check_event(event, census)
        size = first.bytes if isinstance(first, Sparse | Planes) else stored_bytes
        used = [_used(event, census) for event in rest]
        end = max((at + length for at, length in used if length), default=0)
        if end > size:
            raise _Wrong(f"an event speaks of byte {end} of a payload of {size}")
        most = sum(length for _, length in used) + _unused_bytes_max(census, len(used))
        if packed and size > most:
            raise _Wrong(f"a payload of {size} bytes, expected at most {most} for its events")
    except _Wrong as wrong:
        raise CorruptData(f"read {where}: {wrong}") from None


def _unused_bytes_max(census: Census, events: int) -> int:
    """Of a payload's bytes, those that no event of a log speaks of: calls that were begun and discarded,
    edits that only bases hold, and what aligns the others."""
    calls = sum(layout.bytes + AMP_BYTES for layout in census.layouts)
    lossy = sum(align(atom.bytes) for atom in census.atoms if atom.lossy)
    return _CALLS_DISCARDED_MAX * calls + lossy + events * ALIGN_BYTES + _SLICE_BYTES_MAX


def check_record(events: Sequence[Event], step: int, after: int, where: str) -> None:
    """The last entry of a record, and what its head says."""
    seal = events[-1] if events else None
    if not isinstance(seal, Seal) or (seal.step, seal.after) != (step, after):
        found = f"{seal.after} -> {seal.step}" if isinstance(seal, Seal) else "no seal"
        raise CorruptData(f"read {where}: {found} at the end of the record {after} -> {step}")


# ---------------------------------------------------------------------- parts of them


def _once(key: object, seen: set[Any], what: str) -> None:
    if key in seen:
        raise _Wrong(f"{what} {key!r} twice")
    seen.add(key)


def _check_census(census: Census) -> None:
    names: set[str] = set()
    for atom in census.atoms:
        _once(atom.name, names, "atom")
        _bytes_of(atom.dtype, atom.shape)
    keys: set[str] = set()
    for spec in census.optimizers:
        _once(spec.key, keys, "optimizer")
        moved: set[int] = set()
        for atom_id in spec.atoms:
            _once(atom_id, moved, f"in optimizer {spec.key!r}: atom")
            if atom_id >= len(census.atoms):
                raise _Wrong(f"optimizer {spec.key!r} moves atom {atom_id} of {len(census.atoms)}")


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in ELEMENT_TYPES:
        raise _Wrong(f"element type {dtype!r}")
    return tensor_bytes(dtype, shape)


def _check_files(part: PartIndex, census: Census) -> None:
    seen: set[tuple[int, int, int, str]] = set()
    for file in part.files:
        _once(file.identity, seen, "file")
        if file.term > part.term or len(file.chunks) != -(-file.bytes // CHUNK_BYTES):
            raise _Wrong(f"{len(file.chunks)} checksums for {file.bytes} bytes of term {file.term}")
        if file.root:
            raise _Wrong(f"a file in root {file.root}, and no option says where that is")
    _check_kind(part.files, part.session, "session")
    if (found := part.files[part.session].bytes) > (most := session_bytes_max(census)):
        raise _Wrong(f"session values of {found} bytes, expected at most {most}")
    if part.tail is not None:
        _check_kind(part.files, part.tail, "tail")


def _check_kind(files: Sequence[StoredFile], place: int, kind: str) -> None:
    if place >= len(files) or files[place].kind != kind:
        raise _Wrong(f"file {place} of {len(files)} is not its {kind}")


def _check_tensor(tensor: Stored, part: PartIndex, census: Census) -> None:
    atoms, files, place = census.atoms, part.files, tensor.place
    if tensor.atom >= len(atoms) or place.holder >= len(files):
        raise _Wrong(f"a tensor of atom {tensor.atom} in file {place.holder}, which are not there")
    name = f"{atoms[tensor.atom].name}:{tensor.slot}"
    kind = "slots" if tensor.slot else "weights"
    if files[place.holder].kind != kind:
        raise _Wrong(f"{name} in a file of {files[place.holder].kind}, expected {kind}")
    if place.at + place.bytes > files[place.holder].bytes:
        raise _Wrong(f"{name} ends behind its file")
    if tensor.regions not in ((), whole(tensor.shape)):
        raise _Wrong(f"{name} in part: a whole atom lies in one part")
    if place.bytes != _bytes_of(tensor.dtype, tensor.shape):
        raise _Wrong(f"{place.bytes} bytes for {name}, {tensor.dtype}{list(tensor.shape)}")
    _check_slot(census, tensor.atom, tensor.slot, tensor.dtype, tensor.shape)


def _check_slot(census: Census, atom: int, slot: str, dtype: str, shape: tuple[int, ...]) -> None:
    if slot in ("", GRADIENT):
        described = census.atoms[atom]
        own_type = dtype == described.dtype or slot == GRADIENT  # which may be kept in another one
        if not own_type or shape != described.shape:
            raise _Wrong(f"{described.name!r} as {dtype}{list(shape)}")
        return
    key, found, _ = slot.rpartition("/")
    owner = census.places.get(key)
    if not found or owner is None:
        raise _Wrong(f"slot {slot!r} of no optimizer")
    _check_owner(census, atom, owner)


def _check_owner(census: Census, atom: int, optimizer: int) -> None:
    if optimizer >= len(census.optimizers) or atom not in census.moved_by(optimizer):
        raise _Wrong(f"state of atom {atom}, which optimizer {optimizer} does not move")


def _check_apart(ranges: list[tuple[int, int]]) -> None:
    filled = [r for r in sorted(ranges) if r[0] < r[1]]
    for before, after in pairwise(filled):
        if after[0] < before[1]:
            raise _Wrong(f"two tensors share byte {after[0]}")


def _check_event(event: Event, census: Census) -> None:
    if isinstance(event, Edit):
        _check_atoms([event.atom], census)
        _check_slot(census, event.atom, event.slot, event.dtype, event.shape)
        if census.atoms[event.atom].lossy:
            raise _Wrong(f"{census.atoms[event.atom].name!r}, which only bases hold")
        if event.start + event.nbytes > _bytes_of(event.dtype, event.shape):
            raise _Wrong(f"an edit of bytes that {event.dtype}{list(event.shape)} does not have")
    elif isinstance(event, SlotValues):
        _check_owner(census, event.atom, event.optimizer)
    elif isinstance(event, Rebase):
        _check_atoms(event.atoms, census)
        if len(event.versions) != len(event.atoms):
            raise _Wrong(f"{len(event.versions)} versions of {len(event.atoms)} atoms")
    elif isinstance(event, Call):
        if event.optimizer >= len(census.optimizers):
            raise _Wrong(f"a call of optimizer {event.optimizer} of {len(census.optimizers)}")
        moved = len(census.layouts[event.optimizer].offsets)
        if len(event.presence) != presence_bytes(moved):
            raise _Wrong(f"a presence of {len(event.presence)} bytes for {moved} atoms")
    elif isinstance(event, Fingerprints):
        _check_atoms((atom for atom, _ in event.tensors), census)
    elif isinstance(event, Seal):
        if len(event.groups) != len(census.optimizers):
            raise _Wrong(f"{len(event.groups)} groups, expected {len(census.optimizers)}")
        _check_pending(event.pending, census)
    else:
        raise _Wrong("it says twice how its payload is packed")


def _check_pending(pending: Presence, census: Census) -> None:
    most = presence_bytes(len(census.atoms))
    for bits in (pending.zeros, pending.held, pending.sparse):
        if len(bits) > most:
            raise _Wrong(f"a presence of {len(bits)} bytes for {len(census.atoms)} atoms")


def _check_atoms(atoms: Iterable[int], census: Census) -> None:
    for atom in atoms:
        if atom >= len(census.atoms):
            raise _Wrong(f"atom {atom} of {len(census.atoms)}")


def _used(event: Event, census: Census) -> tuple[int, int]:
    """Where an event's part of the payload begins, and how long it is. Gradients that are not there keep
    their place."""
    if isinstance(event, Edit):
        return event.at, event.nbytes
    if isinstance(event, Fingerprints):
        return event.at, 8 * len(event.tensors)
    if isinstance(event, Call):
        ends = [event.at + census.layouts[event.optimizer].bytes]
        ends += [at + 4 for at in event.amp.values()]
        return event.at, max(ends) - event.at
    return 0, 0
