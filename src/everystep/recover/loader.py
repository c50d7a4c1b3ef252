"""Puts a restore point into live models and optimizers, which replay the log behind it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Protocol

import torch

from everystep.core.census import Census, Mode
from everystep.core.events import GRADIENT, SlotValues
from everystep.format.entry import checked_entries
from everystep.recover.expand import Expander
from everystep.recover.groups import add_groups
from everystep.recover.live import LiveTensors
from everystep.recover.matching import check_model, check_optimizers, same_atoms
from everystep.recover.pending import Pending
from everystep.recover.point import RestorePoint
from everystep.recover.slots import SlotLoader, in_order
from everystep.recover.upload import Uploads
from everystep.replay.apply import set_groups
from everystep.replay.engine import Engine
from everystep.replay.tensors import distinct, view_tensor


class Live(Protocol):
    """Live objects and what they are, in the same order."""

    census: Census
    tensors: list[torch.Tensor]

    @property
    def keyed(self) -> dict[str, torch.optim.Optimizer]: ...


class Loader:
    """Of one restore point and one census of live objects. Owned by the thread that trains."""

    def __init__(self, found: RestorePoint, live: Live, run: Path) -> None:
        self._found, self._live, self._run = found, live, run
        self._ids = same_atoms(live.census, found.census)
        self._tensors = {atom: live.tensors[i] for atom, i in self._ids.items()}

    def check(self, *, later_groups: bool = False) -> None:
        """Refuse, before anything is changed, what is not the run's. `later_groups`: those that were added
        since go before it is loaded."""
        check_model(self._live.census, self._found, str(self._run))
        check_optimizers(self._found, self._live.keyed, self._tensors, later_groups=later_groups)

    def give_back_groups(self) -> bool:
        """Give optimizers the param groups that were added during the run, or refuse, before anything is
        changed, what is not the run's. True: there were some, and what belongs to them (a residual) may be
        new: take a census again."""
        self.check()
        return add_groups(self._found.census, self._live.keyed, self._tensors)

    def load(self, *, weights_only: bool = False) -> list[int]:
        """Into live objects that have its param groups; returns the versions of the live atoms."""
        check_model(self._live.census, self._found, str(self._run))
        with torch.no_grad(), Uploads() as uploads:
            versions = self._load_values(uploads)
            if weights_only:
                return versions
            pending = Pending(self._tensors)
            pending.load(self._found, uploads)
            slots = self._load_optimizers(uploads)
        self._replay(slots, pending)
        if self._found.log:
            return [self._found.point.step] * len(versions)
        if self._found.tail_steps:  # it moved its atoms on: they are no longer what the base holds
            for spec in self._found.census.optimizers:
                for atom in spec.atoms if spec.mode is Mode.LOG else ():
                    versions[self._ids[atom]] = self._found.point.step
        return versions

    def _load_values(self, uploads: Uploads) -> list[int]:
        """Copy every atom's value into its live tensor; returns the versions of the live atoms."""
        versions = [0] * len(self._live.tensors)
        for t in self._found.tensors():
            if t.atom in self._ids and t.slot != GRADIENT:
                versions[self._ids[t.atom]] = t.version
                if not t.slot:
                    value = view_tensor(t.data, t.dtype, t.shape)
                    uploads.copy(*distinct(self._tensors[t.atom].detach(), value))
        return versions

    def _load_optimizers(self, uploads: Uploads) -> SlotLoader:
        """Groups and slots of every optimizer."""
        optimizers = self._optimizers()
        for optimizer in optimizers.values():
            optimizer.state.clear()
        self._set_groups()
        slots = SlotLoader(self._found.census, optimizers, self._tensors)
        for t in self._found.tensors():
            if t.slot and t.slot != GRADIENT:
                room = slots.replace(t.atom, t.slot, t.dtype, t.shape)
                uploads.copy(room, view_tensor(t.data, t.dtype, t.shape))
        return slots

    def _replay(self, slots: SlotLoader, pending: Pending) -> None:
        """Slots that are no tensors, whatever the log still holds, then gradients that wait for a step."""
        found, optimizers = self._found, self._optimizers()
        for atom, index, encoded in found.session.values:
            slots.values(SlotValues(atom, index, encoded))
        for optimizer in optimizers.values():
            in_order(optimizer)
        frames = chain([found.tail], (record.body for record in found.log))
        entries = chain.from_iterable(checked_entries(f, found.census, "log") for f in frames)
        target = LiveTensors(found.census, self._tensors, optimizers, slots, pending)
        with Expander(found.census, self._live.tensors) as expander:
            Engine(target).apply(expander.payloads(entries))
        self._set_groups()  # a tail leaves the scalars of its last call
        pending.finish(found.session.pending, found.census.parameters)

    def _optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """By their place in the found census."""
        places = self._found.census.places
        return {places[key]: optimizer for key, optimizer in self._live.keyed.items()}

    def _set_groups(self) -> None:
        for index, optimizer in self._optimizers().items():
            if encoded := self._found.group_values(index):
                set_groups(optimizer, encoded)
