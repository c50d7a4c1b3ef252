"""The hooks on the optimizers: what each step consumes goes into the open record.

What cannot be logged as a gradient (a sparse one, one that a later hook may still change) is sent as state
instead: re-base is the one repair for everything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from everystep.capture.copying.early import Guard
from everystep.capture.copying.release_points import points_outside, release_points
from everystep.capture.record import OpenRecord
from everystep.capture.rng import capture_rng
from everystep.capture.turn import OpenTurn
from everystep.closures import closure_in, with_work_after
from everystep.core.census import Mode, OptimizerSpec
from everystep.core.phases import Phase

_LOOK_OUTSIDE = (3, 30)  # seals without a release point: the model may have been compiled since


class StepHooks:
    """Owned by the training thread. `open_first` seals the state before the first step."""

    def __init__(
        self, record: OpenRecord, turn: OpenTurn, guard: Guard, open_first: Callable[[], None]
    ) -> None:
        self._record = record
        self._turn = turn
        self._guard = guard
        self._open_first = open_first
        self._optimizers = record.live.optimizers
        self._index_of = {id(optimizer): i for i, optimizer in enumerate(self._optimizers)}
        self._pre_handles: list[Any] = []
        self._handles: list[Any] = []  # of all others
        self._entangled: set[int] = set()  # optimizers that step inside each other: sent as state
        self._rng_before = b""  # random states before a call that only the user's code can replay

    # ------------------------------------------------------------------ installing

    def install(self) -> None:
        for index, optimizer in enumerate(self._optimizers):
            self._pre_handles.append(self._register_pre(index, optimizer))
            after = partial(self._guard(self._after_step), index)
            handle = optimizer.register_step_post_hook(lambda *_, run=after: run())
            # first: what other post-hooks do to the weights is an edit, not the step
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(handle.id, last=False)
            self._handles.append(handle)
        if self._record.copier.sides:
            point = self._guard(self._record.release_point)
            self._handles += release_points(self._record.live.models, point)

    def look_outside(self) -> None:
        """At a seal: a model that was compiled after attach has its release points elsewhere."""
        record = self._record
        if record.copier.sides and record.calls.lifetime.pointless in _LOOK_OUTSIDE:
            point = self._guard(record.release_point)
            self._handles += points_outside(record.live.models, point)

    def remove(self) -> None:
        for handle in (*self._handles, *self._pre_handles):
            handle.remove()
        self._handles, self._pre_handles = [], []

    def _register_pre(self, index: int, optimizer: torch.optim.Optimizer) -> Any:
        before = partial(self._guard(self._before_step), index)
        return optimizer.register_step_pre_hook(lambda _, args, kwargs: before(args, kwargs))

    def _is_last(self, index: int) -> bool:
        """Whether no other hook may change the gradients after ours has seen them."""
        hooks = self._optimizers[index]._optimizer_step_pre_hooks
        return bool(next(reversed(hooks)) == self._pre_handles[index].id)

    # ------------------------------------------------------------------ before a step

    def _before_step(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Log the call, or see to it that it is logged when its gradients are there."""
        record = self._record
        if self._is_nested(index):
            return None
        record.calls.discard()
        if not self._turn.calls:
            record.copier.close_window()
            record.copier.in_flight.release_old()  # what no release point came by for
        record.land()
        if not self._is_logged(index):
            return None
        if record.live.groups_have_grown():  # shapes: gradients show them, and the seal looks
            self._send_as_state(index)
            return None
        if record.phase is Phase.OPENING:  # a loop that is not ours: this state counts too
            self._open_first()
            record.land()
            if not self._is_logged(index):
                return None
        if not self._is_last(index):
            self._send_as_state(index)
            return None
        return self._log_or_wrap(index, args, kwargs)

    def _log_or_wrap(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = closure_in(args, kwargs)
        if self._record.live.census.optimizers[index].foreign:
            if (
                len(args) > 1 or kwargs
            ):  # only torch's own are known to use a closure once, and first
                self._send_as_state(index)
                return None
            self._rng_before = capture_rng()
        if closure is None:
            self._log_call(index)
            return None
        return with_work_after(closure, partial(self._guard(self._log_call), index), args, kwargs)

    def _log_call(self, index: int) -> None:
        record = self._record
        if not record.phase.records:  # no more since the step began: a closure takes its time
            return
        record.outbox.patient = record.bases.needs_patience
        with record.or_drop():
            record.calls.log(index)

    def _send_as_state(self, index: int) -> None:
        self._record.states.unlogged.update(self._record.live.census.optimizers[index].atoms)

    def _is_logged(self, index: int) -> bool:
        return self._record.phase.records and not self._is_sent_as_state(index)

    def _is_sent_as_state(self, index: int) -> bool:
        spec = self._record.live.census.optimizers[index]
        return spec.mode is Mode.STATE or index in self._entangled

    # ------------------------------------------------------------------ a step inside another

    def _is_nested(self, index: int) -> bool:
        """Whether this call is part of another one: the outermost is what training asked for. A step that
        runs through another optimizer moves that one's state too, so both are sent as state; so is one in
        whose midst hooks of others run, which would run once more when it is replayed."""
        outer = _outer_call(self._index_of)
        if outer is not None and (outer != index or self._has_other_hooks(index)):
            self._record.calls.discard()
            self._entangled |= {outer, index}
        return outer is not None

    def _has_other_hooks(self, index: int) -> bool:
        optimizer: Any = self._optimizers[index]
        found = {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks}
        found |= {*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks}
        own = {handle.id for handle in (*self._pre_handles, *self._handles)}
        return not found <= own | self._turn.hook_ids

    # ------------------------------------------------------------------ after a step

    def _after_step(self, index: int) -> None:
        """The step is done: the call counts, and what it did to its atoms is no edit."""
        record = self._record
        if self._is_nested(index):  # the outermost may still raise
            if index in self._entangled:
                self._send_as_state(index)
            return
        record.copier.open_window()
        if not record.phase.records:
            record.calls.skip(index)
            return
        spec = record.live.census.optimizers[index]
        if self._is_sent_as_state(index) or self._drew_random_numbers(spec):
            record.calls.discard()
            self._send_as_state(index)
        record.watch.after_step(index)
        record.calls.done(index)
        if not self._is_last(index):  # stay the last to look at the gradients
            self._pre_handles[index].remove()
            self._pre_handles[index] = self._register_pre(index, self._optimizers[index])

    def _drew_random_numbers(self, spec: OptimizerSpec) -> bool:
        """A step that did would draw others when it is replayed."""
        return spec.foreign and capture_rng() != self._rng_before


def _unhooked(self: object) -> None:
    """Stands for a step, to learn what torch wraps one in."""


_STEP_CODE = torch.optim.Optimizer.profile_hook_step(_unhooked).__code__


def _outer_call(index_of: Mapping[int, int]) -> int | None:
    """The outermost of the given optimizers (`id` -> index) whose step encloses the one that runs now: a step
    may call another one, or its base class's. The frames on the stack tell. A count of calls would not: torch
    runs no post-hook when a step raises."""
    outer, own = None, True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_CODE:
            if not own:
                outer = index_of.get(id(frame.f_locals["args"][0]), outer)
            own = False
        frame = frame.f_back
    return outer
