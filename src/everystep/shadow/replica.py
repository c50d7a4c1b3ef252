"""The replica: the newest state of every atom, in shared memory that the next trainer can map.

Owned by the shadow's main thread. It knows bytes and places, not torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from everystep.core.census import Census, align
from everystep.core.dtypes import ELEMENT_TYPES, tensor_bytes
from everystep.core.events import GRADIENT, Edit, Presence
from everystep.core.tensors import Span, Stored, TensorRef
from everystep.errors import CorruptData, NotEnoughMemory
from everystep.format.base import Point, SessionValues
from everystep.format.values import keys_of, without
from everystep.lane.arena import SharedMemory
from everystep.lane.control import ReplicaHandle
from everystep.lane.memory import clear, copy, digests

_EXTENTS_FOR_VALUES = 4  # slots need as much room as values, or twice: a dozen extents at most
Key = tuple[int, str]  # atom, slot; slot "" is the atom's value


class Replica:
    def __init__(self, census: Census, arena_dir: str | None) -> None:
        self.census = census
        self.places: dict[Key, Stored] = {}
        self.extents: list[SharedMemory] = []
        self.versions = [0] * len(census.atoms)
        self.based = [False] * len(census.atoms)
        self.values: dict[
            tuple[int, int], bytes
        ] = {}  # (atom, optimizer): slots that are no tensors
        self._arena_dir = arena_dir
        self._used = 0  # bytes of the newest extent
        self._free: dict[int, list[tuple[int, int]]] = {}  # places of dropped tensors, by size
        self._keys = {spec.key: i for i, spec in enumerate(census.optimizers)}
        self._growth = sum(atom.bytes for atom in census.atoms) // _EXTENTS_FOR_VALUES

    def reserve_values(self) -> None:
        """Room for the value of every atom, allocated now and all at once."""
        self.reserve((i, "", atom.dtype, atom.shape) for i, atom in enumerate(self.census.atoms))

    def adopt(self, handle: ReplicaHandle, extents: list[SharedMemory]) -> None:
        """Take over the memory of the shadow before; not one byte is copied."""
        self.extents = extents
        spans = (t.place for t in handle.places if t.place.holder == len(extents) - 1)
        self._used = max((align(span.at + span.bytes) for span in spans), default=0)
        for tensor in handle.places:
            self.places[tensor.key] = tensor
            self.versions[tensor.atom] = tensor.version
        self.based = [True] * len(self.census.atoms)
        self.values = {(atom, opt): data for atom, opt, data in handle.session.values}

    def reserve(self, tensors: Iterable[tuple[int, str, str, tuple[int, ...]]]) -> None:
        """Make room for tensors (atom, slot, dtype, shape) that have none yet."""
        new = [t for t in dict.fromkeys(tensors) if not self._fits(t)]
        sizes = [tensor_bytes(dtype, shape) for _, _, dtype, shape in new]
        if not new:
            return
        for atom, slot, *_ in new:
            self._drop((atom, slot))
        # a slot that changes its type at every step finds the place that it has left
        left = [self._free[align(s)].pop() if self._free.get(align(s)) else None for s in sizes]
        rows = list(zip(new, sizes, left, strict=True))
        self._make_room(sum(align(size) for _, size, place in rows if place is None))
        for (atom, slot, dtype, shape), size, place in rows:
            extent, at = place or (len(self.extents) - 1, self._used)
            span = Span(extent, at, size)
            self.places[atom, slot] = TensorRef(atom, slot, dtype, shape, 0, span)
            self._used += 0 if place else align(size)

    def _make_room(self, size: int) -> None:
        """Tensors come one by one, but every extent is a descriptor in several processes: they are few."""
        if self.extents and self._used + size <= self.extents[-1].bytes:
            return
        try:
            memory = SharedMemory.create(max(size, self._growth), "replica", self._arena_dir)
        except NotEnoughMemory:
            memory = SharedMemory.create(max(size, 1), "replica", self._arena_dir)
        self.extents.append(memory)
        self._used = 0

    def _fits(self, tensor: tuple[int, str, str, tuple[int, ...]]) -> bool:
        atom, slot, dtype, shape = tensor
        place = self.places.get((atom, slot))
        return place is not None and (place.dtype, place.shape) == (dtype, shape)

    def view(self, key: Key) -> memoryview:
        span = self.places[key].place
        return span.of(self.extents[span.holder].view)

    def write(self, edits: Sequence[tuple[Edit, memoryview]]) -> None:
        """Put the bytes of edits, each with its payload, in their places."""
        first, seen = 0, set[Key]()
        for number, (edit, _) in enumerate(edits):
            key = (edit.atom, edit.slot)
            if (
                edit.start == 0 and key in seen
            ):  # sent twice: the later counts, threads keep no order
                self._write(edits[first:number])
                first, seen = number, set()
            seen.add(key)
        self._write(edits[first:])

    def _write(self, edits: Sequence[tuple[Edit, memoryview]]) -> None:
        self.reserve((edit.atom, edit.slot, edit.dtype, edit.shape) for edit, _ in edits)
        targets, sources = [], []
        for edit, payload in edits:
            if edit.slot and edit.start == 0:
                self._forget_value(edit.atom, edit.slot)
            view = self.view((edit.atom, edit.slot))
            if edit.start + edit.nbytes > len(view) or edit.at + edit.nbytes > len(payload):
                raise CorruptData(
                    f"edit of {self.census.atoms[edit.atom].name}{edit.slot}: out of bounds"
                )
            targets.append(view[edit.start : edit.start + edit.nbytes])
            sources.append(payload[edit.at : edit.at + edit.nbytes])
        copy(targets, sources)

    def _forget_value(self, atom: int, slot: str) -> None:
        """A slot that was something else is a tensor now."""
        key, _, name = slot.rpartition("/")
        own = (atom, self._keys.get(key, -1))
        if own in self.values and name in keys_of(self.values[own]):
            self.values[own] = without(self.values[own], name)

    def set_values(self, atom: int, optimizer: int, encoded: bytes) -> None:
        """All slots of an atom that are no tensors; one that was a tensor is none any more."""
        self.values[atom, optimizer] = encoded
        key = self.census.optimizers[optimizer].key
        for name in keys_of(encoded):
            self._drop((atom, f"{key}/{name}"))

    def drop_slots(self, atom: int, keep: set[str]) -> None:
        """Forget optimizer slots of an atom that its new base does not have."""
        keep = {"", GRADIENT, *keep}
        for key in [k for k in self.places if k[0] == atom and k[1] not in keep]:
            self._drop(key)

    def keep_only(self, atom: int, slots: set[str], optimizers: set[int]) -> None:
        """An atom was re-based: what its new base does not have is gone."""
        self.drop_slots(atom, slots)
        gone = [k for k in self.values if k[0] == atom and k[1] not in optimizers]
        for key in gone:
            del self.values[key]

    def counting(self, pending: Presence) -> Iterator[tuple[Key, Stored]]:
        """Where everything lies that is part of the state. Room for a gradient stays when the gradient was
        consumed: the next one needs it again."""
        for key, place in self.places.items():
            if key[1] != GRADIENT or pending.has(key[0]):
                yield key, place

    def _drop(self, key: Key) -> None:
        """Whoever adopts this memory may reserve the place again, and new places hold zeros."""
        if key in self.places:
            clear(self.view(key))
            span = self.places.pop(key).place
            self._free.setdefault(align(span.bytes), []).append((span.holder, span.at))

    def slots_of(self, atom: int) -> Iterator[tuple[str, memoryview, Stored]]:
        for key, place in self.places.items():
            if key[0] == atom and key[1]:
                yield key[1], self.view(key), place

    def digests(self, keys: Sequence[Key]) -> dict[Key, int]:
        """Of those tensors that are here; the trainer computes the same over its own."""
        here = [key for key in keys if key in self.places]
        widths = [ELEMENT_TYPES[self.places[key].dtype].bytes for key in here]
        return dict(zip(here, digests([self.view(key) for key in here], widths), strict=True))

    @property
    def complete(self) -> bool:
        return all(self.based)

    def forget(self) -> None:
        """Records were lost: what we have can no longer be moved on."""
        self.based = [False] * len(self.census.atoms)

    def handle(
        self, *, line: Point | None, session: SessionValues, tail_bytes: int, tail_steps: int
    ) -> ReplicaHandle:
        places = tuple(
            msgspec.structs.replace(t, version=self.versions[t.atom]) for t in self.places.values()
        )
        return ReplicaHandle(
            step=session.step,
            line=line,
            census=self.census,
            places=places,
            extents=len(self.extents),
            session=session,
            tail_bytes=tail_bytes,
            tail_steps=tail_steps,
        )
