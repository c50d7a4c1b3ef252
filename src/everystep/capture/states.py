"""Sends state as it is: what changed outside `step()`, what could not be logged, and bases.

On a GPU the copies run while the next forward and backward compute, when state does not change. A base
is spread over as many steps as that takes.
"""

from __future__ import annotations

from collections.abc import Iterable

from everystep.capture.bases import BaseQueue
from everystep.capture.census import LiveCensus
from everystep.capture.copying.copier import Copier
from everystep.capture.outbox import Outbox
from everystep.capture.versions import Versions
from everystep.capture.watching.watch import Watch
from everystep.core.events import Rebase, SlotValues
from everystep.format import values
from everystep.replay.tensors import pack


class StateSender:
    """Owned by the training thread."""

    def __init__(
        self,
        live: LiveCensus,
        ring_bytes: int,
        outbox: Outbox,
        copier: Copier,
        watch: Watch,
        versions: Versions,
        bases: BaseQueue,
    ) -> None:
        self._live = live
        self._ring_bytes = ring_bytes
        self._outbox = outbox
        self._copier = copier
        self._watch = watch
        self._versions = versions
        self.bases = bases
        self.target = 0  # the step that the record being filled will be sealed as
        self.edits = 0  # tensors sent because something changed them outside step()
        self.unlogged: set[int] = set()  # atoms whose whole state goes with this record
        self._flying: dict[int, object] = {}  # atoms whose state is being copied, as they looked
        self._wary = False  # state was edited in flight: the next base does not fly

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
                self._mark_in_flight(atom)

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
                self._mark_in_flight(atom)

    def _atom(self, atom: int) -> None:
        """Everything there is of one atom. Its version stays: this is no change."""
        stays = not self._wary
        before = self._outbox.patient
        self._outbox.patient |= 2 * self._live.census.atoms[atom].bytes > self._ring_bytes
        try:
            self._values([atom], stays)
            for index, spec in enumerate(self._live.census.optimizers):
                if atom in spec.atoms:
                    self._slots(index, [atom], stays)
        finally:
            self._outbox.patient = before
        self.bases.baseless.discard(atom)

    # ------------------------------------------------------------------ bases

    def base(self, gradient_bytes: int) -> None:
        """The next slice of what is queued."""
        sent = self.bases.send_slice(gradient_bytes, self._atom, lambda: self._outbox.bytes_sent)
        self._close_base(sent)
        self._wary &= bool(self.bases.atoms_left)

    def unlogged_now(self) -> None:
        """Atoms whose step could not be logged: their whole state, as it is now."""
        if not self.unlogged:
            return
        self._versions.change(self.unlogged, self.target)
        self.bases.add(self.unlogged)
        sent = self.bases.take(self.unlogged)
        for atom in sent:
            self._atom(atom)
        self._close_base(sent)
        self.unlogged.clear()

    def _close_base(self, sent: list[int]) -> None:
        if sent:
            self._outbox.room(0, 16 * len(sent))
            self._outbox.add(Rebase(tuple(sent), self._versions.of(sent)))

    def forget(self) -> None:
        """Nothing of what was to be sent is wanted any more."""
        self.unlogged.clear()
        self.bases.clear()

    # ------------------------------------------------------------------ copies in flight

    def _mark_in_flight(self, atom: int) -> None:
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
