"""How long gradients are kept alive until they are copied: as long as that costs neither time nor memory.

A gradient's memory may be written again right after `step()` (`zero_grad(set_to_none=False)`, static
buffers), or be given to the next forward's activations. In the first case gradients are the same
objects step after step, and the compute stream waits for the copies right after the step. Otherwise
gradients are kept alive, and freed part by part at release points (`release_points.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import call

import torch

from everystep.capture.copying.copier import Copier
from everystep.capture.copying.release_points import POINTS_MAX
from everystep.core.release import release_plan

_SURE_AFTER_STEPS = 2


class GradientLifetime:
    """Owned by the training thread; without GPUs it has nothing to do."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._active = bool(copier.sides)
        self._known: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._new_in_a_row: dict[int, int] = {}
        self._kept: set[int] = set()  # optimizers whose gradients outlived their step
        self._plan: list[int] = []  # bytes that may be kept after the step, then after each point
        self._passed = 0  # release points since the last seal
        self._allocated: list[int] = []  # at each of them, while there is no plan
        self._steps = 0
        self.pointless = 0  # seals in a row without a release point before them

    def look(self, optimizer: int, gradients: Sequence[torch.Tensor]) -> bool:
        """Before a call is logged. False: gradients were written while they were being copied."""
        if not self._active:
            return True
        known = self._known.get(optimizer, [])
        alive = set(map(id, map(call, known))) - {id(None)}
        same = bool(alive) and not alive.isdisjoint(map(id, gradients))
        before = self._new_in_a_row.get(optimizer, 0)
        self._new_in_a_row[optimizer] = 0 if same or not known else before + 1
        self._known[optimizer] = list(map(weakref.ref, gradients))
        if optimizer in self._kept and not self._passed:
            self._plan = []  # no forward came by: gradients would be kept through the next one
        return not (same and optimizer in self._kept)

    def after_step(self, optimizer: int) -> None:
        """The step is queued: keep its gradients if that is safe, else have their copies awaited."""
        if not self._active:
            return
        self._steps += 1
        if self._plan and self._new_in_a_row.get(optimizer, 0) >= _SURE_AFTER_STEPS:
            self._kept.add(optimizer)
            self._copier.in_flight.release(keep_bytes=self._plan[0])
        else:
            self._kept.discard(optimizer)
            self._copier.in_flight.release()

    def release_point(self) -> None:
        """A module is about to compute."""
        if self._passed:
            self._copier.state.release_snapshots()
        if self._passed + 1 < len(self._plan):
            self._copier.in_flight.release(keep_bytes=self._plan[self._passed + 1])
        elif not self._plan and self._passed < POINTS_MAX:
            self._allocated.append(self._copier.allocated_bytes)
        self._passed += 1

    def turn(self) -> None:
        """At a seal: learn from the forward that was just seen, once optimizer state is there."""
        sure = self._steps > _SURE_AFTER_STEPS and not self._copier.in_flight.bytes
        if self._active and sure and not self._plan:
            self._plan = release_plan(self._allocated, self._copier.peak_bytes)
        self.pointless = 0 if self._passed else self.pointless + 1
        if not self._passed:  # no forward comes by a release point: do not keep them through one
            self._copier.state.release_snapshots()
        self._passed, self._allocated = 0, []
