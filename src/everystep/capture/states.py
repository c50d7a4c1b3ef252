"""Sends state as it is: what changed outside `step()`, what could not be logged, and bases.

On a GPU the copies run while the next forward and backward compute, when state does not change. A base
is spread over as many steps as that takes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.copying.copier import Copier
from everystep.capture.outbox import Outbox
from everystep.capture.versions import Versions
from everystep.capture.watching.watch import Watch
from everystep.core.census import Mode
from everystep.core.events import Rebase, SlotValues
from everystep.core.pace import FIRST_SLICE_BYTES, next_slice_bytes, steps_left
from everystep.format import values
from everystep.lane.ring import RingWriter
from everystep.replay.tensors import pack

_SLOTS_FOR_BASES = 4


class StateSender:
    """Owned by the training thread."""

    def __init__(
        self,
        live: LiveCensus,
        ring: RingWriter,
        outbox: Outbox,
        copier: Copier,
        watch: Watch,
        versions: Versions,
        budget_percent: float,
    ) -> None:
        self._live = live
        self._ring = ring
        self._outbox = outbox
        self._copier = copier
        self._watch = watch
        self._versions = versions
        self._budget_percent = budget_percent
        self.target = 0  # the step that the record being filled will be sealed as
        self.edits = 0  # tensors sent because something changed them outside step()
        self.unlogged: set[int] = set()  # atoms whose whole state goes with this record
        self._queue: list[tuple[int, ...]] = []  # atoms still to be based, in units
        self._flying: dict[int, object] = {}  # atoms whose state is being copied, as they looked
        self.baseless: set[int] = set()  # the shadow has no base of these, nor use for gradients
        self._wary = False  # state was edited in flight: the next base does not fly
        self._slice_bytes = FIRST_SLICE_BYTES
        self._stall_before = 0.0
        self._log_atoms = {a for s in live.census.optimizers if s.mode is Mode.LOG for a in s.atoms}

    # ------------------------------------------------------------------ what changed

    def begin_seal(self, gradient_bytes: int) -> None:
        """How much state may leave before the next step: what gradients leave of the link."""
        link, window = self._copier.link_bytes_per_second, self._copier.window_seconds
        known = link > 0 and window > 0
        self._copier.state.live_bytes = (
            max(0, int(link * window) - gradient_bytes) if known else None
        )

    def changes(
        self, atoms: Iterable[int] | None, optimizers: Iterable[int], *, stays: bool
    ) -> None:
        """What changed outside step(), unless its whole state is sent at this seal anyway."""
        edited = [a for a in self._watch.edited_values(atoms) if a not in self.unlogged]
        self._values(edited, stays)
        self._versions.change(edited, self.target)
        self.edits += sum(not self._live.census.atoms[a].buffer for a in edited)
        for index in optimizers:
            found = self._watch.slots(index)
            if found.lost:
                self.unlogged.update(self._live.census.optimizers[index].atoms)
            changed = [a for a in found.edited if a not in self.unlogged]
            self._slots(index, changed, stays)
            self._versions.change(changed, self.target)
            self.edits += len(changed)

    def _values(self, atoms: list[int], stays: bool) -> None:
        """`stays`: only a step will change them again; buffers change in any forward."""
        for atom in atoms:
            steady = stays and not self._live.census.atoms[atom].buffer
            self._outbox.tensor(atom, "", self._live.tensors[atom], stays=steady)
            if steady:
                self._fly(atom)

    def _slots(self, index: int, atoms: list[int], stays: bool) -> None:
        """All slots of these atoms: tensors one by one, then the others together. An empty state is told too:
        it is not the same as none."""
        prefix = self._live.census.optimizers[index].key + "/"
        for atom in atoms:
            state = self._live.slots_of(index, atom)
            for name, value in state.tensors.items():
                self._outbox.tensor(atom, prefix + name, value, stays=stays)
            if state.others or state.is_empty:
                encoded = values.encode(state.others, self._live.where(index, atom), pack)
                self._outbox.room(0, len(encoded))
                self._outbox.add(SlotValues(atom, index, encoded))
            if stays:
                self._fly(atom)

    def _atom(self, atom: int) -> None:
        """Everything there is of one atom. Its version stays: this is no change."""
        stays = not self._wary
        ring = self._ring.geometry
        before = self._outbox.patient
        self._outbox.patient |= 2 * self._live.census.atoms[atom].bytes > ring.slots * ring.capacity
        try:
            self._values([atom], stays)
            for index, spec in enumerate(self._live.census.optimizers):
                if atom in spec.atoms:
                    self._slots(index, [atom], stays)
        finally:
            self._outbox.patient = before
        self.baseless.discard(atom)

    # ------------------------------------------------------------------ bases

    def queue_base(self, atoms: Iterable[int] | None = None, *, fresh: bool = False) -> None:
        """Have the whole state of these atoms (None: all) sent, some at every seal; log atoms go together.
        `fresh`: the shadow holds none of them until they come."""
        wanted = set(range(len(self._live.tensors))) if atoms is None else set(atoms)
        queued = {a for unit in self._queue for a in unit}
        if wanted & self._log_atoms:
            self._queue = [u for u in self._queue if not self._log_atoms & set(u)]
            self._queue.insert(0, tuple(sorted(self._log_atoms)))
        self._queue += [(a,) for a in sorted(wanted - self._log_atoms - queued)]
        if fresh:
            self.baseless.update(wanted)

    def base(self, gradient_bytes: int) -> None:
        """The next slice of what is queued, as long as half the ring stays free for records."""
        slice_bytes = self._next_slice(gradient_bytes) if self._queue else 0
        sent: list[int] = []
        before = self._outbox.bytes_sent
        while self._queue and (not sent or self._ring_has_room):
            if sent and self._copier.sides and self._outbox.bytes_sent - before >= slice_bytes:
                break
            for atom in self._queue.pop(0):
                self._atom(atom)
                sent.append(atom)
        self._close_base(sent)
        self._wary &= bool(self._queue)

    def unlogged_now(self) -> None:
        """Atoms whose step could not be logged: their whole state, as it is now."""
        if not self.unlogged:
            return
        self._versions.change(self.unlogged, self.target)
        self.queue_base(self.unlogged)
        now = [unit for unit in self._queue if self.unlogged & set(unit)]
        self._queue = [unit for unit in self._queue if unit not in now]
        sent = [atom for unit in now for atom in unit]
        for atom in sent:
            self._atom(atom)
        self._close_base(sent)
        self.unlogged.clear()

    def _close_base(self, sent: list[int]) -> None:
        if sent:
            self._outbox.room(0, 16 * len(sent))
            self._outbox.add(Rebase(tuple(sent), self._versions.of(sent)))

    def _next_slice(self, gradient_bytes: int) -> int:
        stall = self._copier.stall_seconds
        self._slice_bytes = next_slice_bytes(
            self._slice_bytes,
            link_bytes_per_second=self._copier.link_bytes_per_second,
            window_seconds=self._copier.window_seconds,
            gradient_bytes=gradient_bytes,
            stall_seconds=stall - self._stall_before,
            budget_percent=self._budget_percent,
        )
        self._stall_before = stall
        return self._slice_bytes

    @property
    def _ring_has_room(self) -> bool:
        return 2 * self._ring.free >= self._ring.geometry.slots

    @property
    def needs_patience(self) -> bool:
        """A base and the calls of its steps do not fit into a short ring together: training waits for the
        shadow then, or there would never be a base."""
        return bool(self._queue) and self._ring.geometry.slots < _SLOTS_FOR_BASES

    @property
    def atoms_left(self) -> int:
        """Atoms of a base that have still to be sent."""
        return sum(len(unit) for unit in self._queue)

    @property
    def steps_left(self) -> int:
        """About how many steps the rest of a base is spread over."""
        atoms = [a for unit in self._queue for a in unit]
        tensors = [self._live.tensors[a] for a in atoms]
        for index in range(len(self._live.optimizers)):
            slots = (v for a in atoms for v in self._live.state_of(index, a).values())
            tensors += [value for value in slots if isinstance(value, torch.Tensor)]
        slice_bytes = self._slice_bytes if self._copier.sides else self._ring.geometry.bytes // 2
        return steps_left(sum(t.nbytes for t in tensors), slice_bytes)

    def forget(self) -> None:
        """Nothing of what was to be sent is wanted any more."""
        self.unlogged.clear()
        self._queue.clear()
        self.baseless.clear()

    # ------------------------------------------------------------------ copies in flight

    def _fly(self, atom: int) -> None:
        if self._copier.sides:
            self._flying[atom] = self._watch.looks(atom)

    def settle_if_landed(self) -> bool:
        """Commit what has been copied meanwhile. False: somebody changed it, and a gap was made."""
        return not self._flying or not self._copier.state.has_landed or self._settle()

    def land(self) -> bool:
        """State may change from here on, or must be in the ring now. False as above."""
        if not self._copier.state.in_flight:
            self._flying.clear()
            return True
        self._copier.state.wait_for_copy()
        return self._settle()

    def _settle(self) -> bool:
        intact = all(self._watch.looks(atom) == mark for atom, mark in self._flying.items())
        self._flying.clear()
        torn = self._copier.settle(intact=intact)
        self._wary |= torn
        return not torn
