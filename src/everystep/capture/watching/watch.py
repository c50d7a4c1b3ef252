"""Notices what changes atoms outside `step()`: clamps, swaps, re-initialisation, BatchNorm.

On the CPU by comparing digests of the bytes, because version counters miss `p.data` edits,
BatchNorm's statistics and fused steps. Elsewhere, and for the part of large frozen parameters and slots whose
turn it is not (`suspicion.py`), by version and address, which are hints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import xxhash

from everystep.capture.census import LiveCensus
from everystep.capture.watching.slot_digests import digests_of_slots
from everystep.capture.watching.state_stamp import Hints, Slots, StateStamp
from everystep.capture.watching.suspicion import Suspicions
from everystep.core.census import Mode
from everystep.replay.tensors import raw_bytes

_BUFFER_BYTES_MAX = 64 << 10
Mark = int | tuple[int, int]


class SlotChanges(NamedTuple):
    edited: list[int]  # atoms whose state was replaced or written
    lost: bool  # thrown away, or perhaps edited where nobody looked: an edit cannot say that, a new base can


class Watch:
    """Owned by the training thread. A mark is what an atom looked like when we last knew it."""

    def __init__(self, live: LiveCensus, suspicions: Suspicions) -> None:
        self._live, self._suspicions = live, suspicions
        self._views: dict[int, tuple[int, memoryview]] = {}
        moved = {atom for spec in live.census.optimizers for atom in spec.atoms}
        self._always = [i for i, atom in enumerate(live.census.atoms) if i in moved or atom.buffer]
        always = set(self._always)
        self._frozen = [i for i in range(len(live.tensors)) if i not in always]
        self._frozen_bytes = sum(live.census.atoms[i].bytes for i in self._frozen)
        self._round = 0
        self._by_hints = all(t.device.type != "cpu" for t in live.tensors)
        self._atoms = [spec.atoms for spec in live.census.optimizers]
        self._moves_all = [len(set(atoms)) == len(live.tensors) for atoms in self._atoms]
        # torch's own element-wise optimizers write their slots and weights where they lie
        self._in_place = [spec.mode is Mode.REPLAY for spec in live.census.optimizers]
        # BatchNorm's statistics change without a trace: where bytes are not compared, they always go
        self._small_buffers = [
            i
            for i, atom in enumerate(live.census.atoms)
            if atom.buffer
            and atom.bytes <= _BUFFER_BYTES_MAX
            and live.tensors[i].device.type != "cpu"
        ]
        self._marks: list[Mark] = []  # of all atoms, unless hints are all there is
        self._seen = Hints([])
        self._hints: dict[int, Mark] = {}
        self._slots: list[StateStamp] = []
        self._slot_bytes = [
            digests_of_slots(live, i, lambda: suspicions.slots.bytes_now)
            for i in range(len(live.optimizers))
        ]
        self.mark_all()

    def mark_all(self) -> None:
        """Everything is known as it is now."""
        self._seen = Hints(self._live.tensors if self._by_hints else [])
        self._marks = [] if self._by_hints else [*map(self._digest, range(len(self._live.tensors)))]
        self._hints = {i: self._hint(i) for i in self._frozen}
        self._slots = [StateStamp(optimizer) for optimizer in self._live.optimizers]
        for digests in self._slot_bytes:
            digests.mark(replaced=True)

    def after_step(self, index: int) -> None:
        """Mark its atoms as they are now: what the optimizer itself just wrote is no edit."""
        optimizer, in_place = self._live.optimizers[index], self._in_place[index]
        same = in_place and self._slots[index].stepped(optimizer)
        if not same:
            self._slots[index] = StateStamp(optimizer)
        self._slot_bytes[index].mark(replaced=not same)
        if self._by_hints and in_place and self._moves_all[index]:
            self._seen.after_writes(self._live.tensors)
            return
        for atom in self._atoms[index]:
            self._mark(atom)

    def edited_values(self, atoms: Iterable[int] | None = None) -> list[int]:
        """Atoms whose bytes differ from their mark; they are marked again. None: of all atoms, at a seal."""
        if self._by_hints:
            edited = self._edited_by_hints(atoms)
        else:
            edited = self._edited_at_seal() if atoms is None else self._edited_by_bytes(atoms)
        if atoms is None:
            self._suspicions.after_seal()
        always = self._small_buffers if atoms is None else []
        return [a for a in edited if a not in always] + always

    def _edited_at_seal(self) -> list[int]:
        written = self._frozen_with_other_hints()
        edited = self._edited_by_bytes([*self._always, *written])
        looked_at = self._frozen_now(set(written))
        without_a_trace = self._edited_by_bytes(looked_at)
        if without_a_trace:
            late = len(written) + len(looked_at) < len(self._frozen)
            name = self._live.census.atoms[without_a_trace[0]].name
            self._suspicions.weights.confirm(name, late=late)
            edited += without_a_trace + self._edited_by_bytes(self._frozen if late else [])
        return edited

    def _edited_by_bytes(self, atoms: Iterable[int]) -> list[int]:
        edited = []
        for atom in atoms:
            mark = self._digest(atom)
            if mark != self._marks[atom]:
                self._marks[atom] = mark
                edited.append(atom)
        return edited

    def _edited_by_hints(self, atoms: Iterable[int] | None) -> list[int]:
        now = Hints(self._live.tensors)
        if now == self._seen:  # nearly always, so it must be quick
            return []
        looked_at = range(len(self._live.tensors)) if atoms is None else atoms
        before, after = self._seen.pairs(), now.pairs()
        edited = [a for a in looked_at if before[a] != after[a]]
        for atom in edited:
            self._mark(atom)
        return edited

    def looks(self, atom: int) -> object:
        """A hint that changes when the atom's value or slots are written or replaced."""
        specs = enumerate(self._live.census.optimizers)
        values = [
            value
            for index, spec in specs
            if atom in spec.atoms
            for value in self._live.state_of(index, atom).values()
            if isinstance(value, torch.Tensor)
        ]
        hints = Hints([self._live.tensors[atom], *values])
        return tuple(hints.addresses), tuple(
            hints.versions
        )  # numbers are no work for the collector

    def differs(self) -> bool:
        """Whether any atom or slot differs from its mark; nothing is marked."""
        slots = zip(self._slots, self._live.optimizers, strict=True)
        if not all(stamp.still_holds(optimizer) for stamp, optimizer in slots):
            return True
        if self._by_hints:
            return Hints(self._live.tensors) != self._seen
        known = self._suspicions.weights.bytes_now >= self._frozen_bytes  # as of the last seal
        looked_at = [*self._always, *(self._frozen if known else [])]
        weights = any(self._digest(atom) != self._marks[atom] for atom in looked_at)
        return weights or any(digests.differ() for digests in self._slot_bytes)

    def slots(self, index: int) -> SlotChanges:
        """What happened to an optimizer's state outside its step; it is marked again."""
        before, optimizer = self._slots[index], self._live.optimizers[index]
        edited = self._slot_bytes[index].edited()
        if before.still_holds(optimizer):
            return SlotChanges(edited, self._suspect_slots(index, edited))
        now = self._slots[index] = StateStamp(optimizer)
        old, new = before.slots(), now.slots()
        lost = self._suspect_slots(index, [a for a in edited if self._same(a, old, new)])
        for atom in self._atoms[index]:
            owner = id(self._live.tensors[atom])
            was, there = old.get(owner), new.get(owner)
            lost |= bool((was or {}).keys() - (there or {}).keys())
            lost |= there is None and was is not None
            if was != there and atom not in edited:
                edited.append(atom)
        self._slot_bytes[index].mark(replaced=True)
        return SlotChanges(edited, lost)

    def _same(self, atom: int, old: dict[int, Slots], new: dict[int, Slots]) -> bool:
        owner = id(self._live.tensors[atom])
        return old.get(owner) == new.get(owner)

    def _suspect_slots(self, index: int, without_a_trace: list[int]) -> bool:
        """True: where these were edited, others may have been, too."""
        if not without_a_trace:
            return False
        late = not self._slot_bytes[index].is_whole
        name = self._live.census.atoms[without_a_trace[0]].name
        self._suspicions.slots.confirm(name, late=late)
        return late

    def _frozen_with_other_hints(self) -> list[int]:
        hints: dict[int, Mark] = {i: self._hint(i) for i in self._frozen}
        chosen = [i for i in self._frozen if hints[i] != self._hints[i]]
        self._hints = hints
        return chosen

    def _frozen_now(self, without: set[int]) -> list[int]:
        """The frozen atoms whose turn it is: one at least, however large."""
        left = self._suspicions.weights.bytes_now
        chosen: list[int] = []
        for _ in range(len(self._frozen)):
            atom = self._frozen[self._round % len(self._frozen)]
            if atom not in without:
                left -= self._live.census.atoms[atom].bytes
                if left < 0 and chosen:
                    break
                chosen.append(atom)
            self._round += 1
        return chosen

    def _mark(self, atom: int) -> None:
        if self._by_hints:
            self._seen.addresses[atom], self._seen.versions[atom] = self._hint(atom)
        else:
            self._marks[atom] = self._digest(atom)

    def _digest(self, atom: int) -> Mark:
        if self._live.tensors[atom].device.type != "cpu":
            return self._hint(atom)
        return xxhash.xxh3_64_intdigest(self._bytes(atom))

    def _bytes(self, atom: int) -> memoryview:
        tensor = self._live.tensors[atom]
        address = tensor.data_ptr()
        known = self._views.get(atom)
        if known is not None and known[0] == address:
            return known[1]
        view = raw_bytes(tensor)
        if tensor.is_contiguous():  # otherwise the bytes are a copy, and would grow old
            self._views[atom] = (address, view)
        return view

    def _hint(self, atom: int) -> tuple[int, int]:
        tensor = self._live.tensors[atom]
        return tensor.data_ptr(), tensor._version
