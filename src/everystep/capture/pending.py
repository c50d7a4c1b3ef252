"""Gradients that a seal finds on the parameters: they may be part of a step that is still to come.

A loop that calls `backward` every turn and `step` every few turns carries them over the seal, so they are
sent with the record. Most loops do not need them: they call `zero_grad` after the step, or at the start of
the next turn. That shows in the gradient objects: those of the last seal are gone by the next one.

A parameter in no optimizer has a gradient, too, which training may read: `clip_grad_norm_` over the whole
model does. Nobody consumes it, but whoever clears it does so as with the others: once a turn has stepped.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence, Set
from operator import attrgetter

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.outbox import Outbox
from everystep.capture.watching.training_stamp import GradientStamps, is_zero
from everystep.core.events import GRADIENT, Presence, pack_presence
from everystep.core.pending import Habit, carries_over, learn
from everystep.core.sizes import size
from everystep.replay.tensors import gradient_dtype

log = logging.getLogger("everystep")

_UNMOVED_BYTES_TOLD = 1 << 20
_NAMED = 3
_grad = attrgetter("grad")


class PendingGradients:
    """Owned by the training thread."""

    def __init__(self, live: LiveCensus, outbox: Outbox) -> None:
        self._live, self._outbox = live, outbox
        self._atoms = [*(spec.atoms for spec in live.census.optimizers), live.in_no_optimizer]
        self._habits = [Habit.UNKNOWN] * len(self._atoms)
        self._before: list[list[weakref.ref[torch.Tensor]]] = [[] for _ in self._atoms]
        self._stamps = GradientStamps(live)  # at the last seal
        self._told_sparse = self._told_unmoved = False
        self.unmoved: list[
            str
        ] = []  # in no optimizer, and their gradients went with the last record

    def send(self, consumed_by: Set[int], *, again: bool) -> Presence:
        """Put the gradients that later steps may need into the record. `consumed_by`: ids of the optimizers
        that stepped in the turn; `again`: the record is of the last seal's step."""
        count = len(self._live.tensors)
        zeros, held, sparse = ([False] * count for _ in range(3))
        for index, atoms in enumerate(self._atoms):
            gradients = self._gradients(index)
            if all(gradient is None for gradient in gradients):
                self._before[index] = []
                continue
            called = self._is_called(index, consumed_by)
            sends = self._carries_over(index, gradients, called=called, again=again)
            for atom, gradient in zip(atoms, gradients, strict=True):
                if gradient is None or held[atom]:
                    continue
                if gradient.layout is not torch.strided:
                    sparse[atom] = True
                    if sends and gradient._nnz():
                        self._tell_sparse(atom)
                elif sends and self._send(atom, gradient):
                    held[atom] = True
                else:
                    zeros[atom] = True
        self._look_at_unmoved(held)
        self.turn()
        return Presence(*(pack_presence(p) if any(p) else b"" for p in (zeros, held, sparse)))

    def _is_called(self, index: int, consumed_by: Set[int]) -> bool:
        if index == len(self._live.optimizers):  # of no optimizer
            return bool(consumed_by)
        return id(self._live.optimizers[index]) in consumed_by

    def _carries_over(
        self, index: int, gradients: Sequence[torch.Tensor | None], *, called: bool, again: bool
    ) -> bool:
        if again:  # they survived because nothing has happened
            return carries_over(self._habits[index], called=called)
        present = [g for g in gradients if g is not None]
        before = {id(g) for ref in self._before[index] if (g := ref()) is not None}
        survived = not before.isdisjoint(map(id, present))
        known = bool(self._before[index])
        self._habits[index] = learn(self._habits[index], known=known, survived=survived)
        self._before[index] = list(map(weakref.ref, present))
        return carries_over(self._habits[index], called=called)

    def _send(self, atom: int, gradient: torch.Tensor) -> bool:
        """False: there is nothing in it but zeros, which need no bytes."""
        usual = gradient.dtype is gradient_dtype(self._live.tensors[atom])
        if usual and gradient.device.type == "cpu" and is_zero(gradient):
            return False
        self._outbox.tensor(atom, GRADIENT, gradient, stays=False)
        return True

    def _tell_sparse(self, atom: int) -> None:
        if not self._told_sparse:
            self._told_sparse = True
            log.warning(
                "everystep: the sparse gradient of %s is carried over a seal and cannot be recorded: a "
                "resume from such a step lacks it; seal after optimizer.step() and zero_grad() instead",
                self._live.census.atoms[atom].name,
            )

    def _look_at_unmoved(self, held: Sequence[bool]) -> None:
        """Nobody can tell whether training reads them. Mostly they were forgotten."""
        atoms = [atom for atom in self._live.in_no_optimizer if held[atom]]
        self.unmoved = [self._live.census.atoms[atom].name for atom in atoms]
        total = sum(self._live.census.atoms[atom].bytes for atom in atoms)
        if total >= _UNMOVED_BYTES_TOLD and not self._told_unmoved:
            self._told_unmoved = True
            more = f" and {len(atoms) - _NAMED} more" if len(atoms) > _NAMED else ""
            log.warning(
                "everystep: gradients of parameters that are in no optimizer go with every record, %s each "
                "time, because training may read them: %s%s; if it does not, freeze these parameters with "
                "requires_grad_(False), or clear their gradients with model.zero_grad()",
                size(total),
                ", ".join(self.unmoved[:_NAMED]),
                more,
            )

    def turn(self) -> None:
        """A step is sealed, recorded or not."""
        self._stamps = GradientStamps(self._live)

    def changed(self) -> bool:
        """Whether gradients have been computed, cleared or written since the last seal."""
        return any(self._stamps.differing(self._live))

    def have_moved_on(self, consumed_by: Set[int]) -> bool:
        return self._stamps.have_moved_on(self._live, consumed_by)

    def _gradients(self, index: int) -> list[torch.Tensor | None]:
        return list(map(_grad, map(self._live.tensors.__getitem__, self._atoms[index])))
