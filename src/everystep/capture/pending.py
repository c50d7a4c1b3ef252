"""Gradients that a seal finds on the parameters: they may be part of a step that is still to come.

A loop that calls `backward` every turn and `step` every few turns carries them over the seal, so they are
sent with the record. Most loops do not need them: they call `zero_grad` after the step, or at the start of
the next turn. That shows in the gradient objects: those of the last seal are gone by the next one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from operator import attrgetter

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.outbox import Outbox
from everystep.core.events import GRADIENT, Presence, pack_presence
from everystep.core.pending import Habit, carries_over, learn

log = logging.getLogger("everystep")

_grad = attrgetter("grad")
GradientStamp = tuple[tuple[int, int], ...]


class PendingGradients:
    """Owned by the training thread."""

    def __init__(self, live: LiveCensus, outbox: Outbox) -> None:
        self._live, self._outbox = live, outbox
        self._atoms = [spec.atoms for spec in live.census.optimizers]
        self._habits = [Habit.UNKNOWN] * len(self._atoms)
        self._called: set[int] = set()  # optimizers that stepped since the last seal
        self._before: list[list[weakref.ref[torch.Tensor]]] = [[] for _ in self._atoms]
        self._stamp: GradientStamp = ()
        self._told_sparse = False

    def stepped(self, index: int) -> None:
        """An optimizer has consumed what there was."""
        self._called.add(index)

    def send(self) -> Presence:
        """Put the gradients that later steps may need into the record."""
        count = len(self._live.tensors)
        zeros, held, sparse = ([False] * count for _ in range(3))
        for index, atoms in enumerate(self._atoms):
            gradients = self._gradients(index)
            if all(gradient is None for gradient in gradients):
                self._before[index] = []
                continue
            sends = self._carries_over(index, gradients)
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
        self.turn()
        return Presence(*(pack_presence(p) if any(p) else b"" for p in (zeros, held, sparse)))

    def _carries_over(self, index: int, gradients: Sequence[torch.Tensor | None]) -> bool:
        present = [g for g in gradients if g is not None]
        before = {id(g) for ref in self._before[index] if (g := ref()) is not None}
        survived = not before.isdisjoint(map(id, present))
        known = bool(self._before[index])
        self._habits[index] = learn(self._habits[index], known=known, survived=survived)
        self._before[index] = list(map(weakref.ref, present))
        return carries_over(self._habits[index], called=index in self._called)

    def _send(self, atom: int, gradient: torch.Tensor) -> bool:
        """False: there is nothing in it but zeros, which need no bytes."""
        if gradient.device.type == "cpu" and _is_zero(gradient):
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

    def turn(self) -> None:
        """A step is sealed, recorded or not."""
        self._called.clear()
        self._stamp = gradient_stamp(self._live)

    def changed(self) -> bool:
        """Whether gradients have been computed, cleared or written since the last seal."""
        return gradient_stamp(self._live) != self._stamp

    def _gradients(self, index: int) -> list[torch.Tensor | None]:
        return list(map(_grad, map(self._live.tensors.__getitem__, self._atoms[index])))


def gradient_stamp(live: LiveCensus) -> GradientStamp:
    """Changes when a gradient is computed, cleared or written."""
    found = (live.tensors[atom].grad for spec in live.census.optimizers for atom in spec.atoms)
    return tuple((id(g), g._version) for g in found if g is not None)


def _is_zero(gradient: torch.Tensor) -> bool:
    """In every bit: a negative zero is another number."""
    flat = gradient.detach().contiguous().view(-1)
    return not bool(flat.view(torch.uint8).any())
