"""The tap: hooks on the optimizers that log what each step consumed, and the seal that ends a step.

All of it runs on the training thread. What cannot be logged as a gradient (a sparse one, one that a
later hook may still change) is sent as state instead: re-base is the one repair for everything.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from everystep.capture.calls import CallLog
from everystep.capture.census import LiveCensus
from everystep.capture.copier import Copier
from everystep.capture.early import Guard
from everystep.capture.fingerprints import FingerprintSender
from everystep.capture.nesting import outer_call
from everystep.capture.outbox import OrLetGo, Outbox
from everystep.capture.pending import PendingGradients
from everystep.capture.release_points import points_outside, release_points
from everystep.capture.rng import capture_rng
from everystep.capture.state import UserState
from everystep.capture.states import StateSender
from everystep.capture.suspicion import Suspicions
from everystep.capture.turn import Moment, OpenTurn
from everystep.capture.watch import Watch
from everystep.closures import closure_in, with_work_after
from everystep.core.cadence import Rest
from everystep.core.census import Mode, OptimizerSpec
from everystep.core.events import Seal
from everystep.lane.ring import RingWriter

_LOOK_OUTSIDE = (3, 30)  # seals without a release point: the model may have been compiled since


class Tap:
    """One lane's worth of recording: a census, a ring and the hooks. Made anew when either changes."""

    def __init__(
        self,
        live: LiveCensus,
        ring: RingWriter,
        user_state: UserState,
        *,
        step: int,
        turn: OpenTurn,
        suspicions: Suspicions,
        versions: list[int],
        guard: Guard,
        may_wait: Callable[[float, bool], bool],
        rest: Rest,
        budget_percent: float,
        fingerprint_every: int,
    ) -> None:
        self.live = live
        self.step = step
        self.versions = versions
        self.outgrown = False  # the census is no longer true: a new tap is needed
        self._unsent = False  # the last seal found it so, and sent nothing
        self._torn = False  # a seal was interrupted
        self.dropped = 0
        self._rebases = 0
        self._ring = ring
        self.copier = Copier(ring, {t.device for t in live.tensors})
        self.outbox = Outbox(ring, self.copier, may_wait, self.land)
        self._watch = Watch(live, suspicions)
        self.states = StateSender(
            live, ring, self.outbox, self.copier, self._watch, versions, budget_percent
        )
        self.log = CallLog(
            live,
            self.outbox,
            self.copier,
            self.states,
            versions,
            guard=guard,
            may_go_early=lambda: self.flowing and self.opened and not self.outgrown,
            budget_percent=budget_percent,
        )
        self.pending = PendingGradients(live, self.outbox)
        self.prints = FingerprintSender(live, self.outbox, self.copier, fingerprint_every)
        self._rest = rest
        self._user_state = user_state
        self._letting_go = False
        self._resting = False  # letting go on purpose, until the next base is wanted
        self._awake = False
        self._gap_told = False
        self._last_state = self._last_rng = b""
        self._last_groups = [b""] * len(live.optimizers)
        self._handles: list[Any] = []
        self._pre_handles: list[Any] = []
        self._own_ids: set[int] = set()  # of hooks behind a step
        self._guard = guard
        self._index_of = {id(optimizer): i for i, optimizer in enumerate(live.optimizers)}
        self._entangled: set[int] = set()  # optimizers that step inside each other: sent as state
        self._rng_before = b""  # as a call that only the user's code can replay began
        self.opened = False
        self._turn = turn
        self._opening = turn.sealed  # what the seal says that comes before the first step
        self._begin(step)

    def _begin(self, target: int) -> None:
        """Events from here on belong to the step that will be sealed as `target`."""
        self.states.target = target
        self.outbox.begin(target)

    # ------------------------------------------------------------------ hooks

    def install(self) -> None:
        for index, optimizer in enumerate(self.live.optimizers):
            self._pre_handles.append(self._register_pre(index, optimizer))
            after = partial(self._guard(self._after_step), index)
            handle = optimizer.register_step_post_hook(lambda *_, run=after: run())
            # first: what other post-hooks do to the weights is an edit, not the step
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(handle.id, last=False)
            self._handles.append(handle)
        self._own_ids = {handle.id for handle in self._handles}
        if self.copier.sides:
            self._handles += release_points(self.live.models, self._guard(self._release_point))

    def _register_pre(self, index: int, optimizer: torch.optim.Optimizer) -> Any:
        before = partial(self._guard(self._before_step), index)
        return optimizer.register_step_pre_hook(lambda _, args, kwargs: before(args, kwargs))

    def remove(self) -> None:
        for handle in (*self._handles, *self._pre_handles):
            handle.remove()
        self._handles, self._pre_handles = [], []
        self.log.rest()
        self.land()
        self.copier.close()

    def _release_point(self) -> None:
        """A module computes next: memory may be needed, and copies may be done meanwhile."""
        self.log.lifetime.release_point()
        if not self.states.settle_if_landed():
            self.let_go(told=True)

    def land(self) -> None:
        """State may change from here on, or must be in the ring now."""
        if not self.states.land():
            self.let_go(told=True)

    def _before_step(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Log the call, or see to it that it is logged when its gradients are there."""
        if self._is_nested(index):
            return None
        self.log.discard()
        if not self._turn.calls:
            self.copier.close_window()
            self.copier.in_flight.release_old()  # what no release point came by for
        self.land()
        spec = self.live.census.optimizers[index]
        if self._letting_go or self.outgrown or self._is_sent_as_state(index):
            return None
        if self.live.groups_have_grown():  # shapes: gradients show them, and the seal looks
            self.outgrown = True
            return None
        if not self.opened:  # a loop that is not ours: the state before its first step counts too
            self.open()
            self.land()
        hooks = self.live.optimizers[index]._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self._pre_handles[index].id:
            self.states.unlogged.update(spec.atoms)  # a later hook may still change the gradients
            return None
        closure = closure_in(args, kwargs)
        if spec.foreign:
            if (
                len(args) > 1 or kwargs
            ):  # only torch's own are known to use a closure once, and first
                self.states.unlogged.update(spec.atoms)
                return None
            self._rng_before = capture_rng()
        if closure is None:
            self._log_call(index)
            return None
        return with_work_after(closure, partial(self._guard(self._log_call), index), args, kwargs)

    def _is_sent_as_state(self, index: int) -> bool:
        spec = self.live.census.optimizers[index]
        return spec.mode is Mode.STATE or index in self._entangled

    def _is_nested(self, index: int) -> bool:
        """Whether this call is part of another one: the outermost is what training asked for. A step that
        runs through another optimizer moves that one's state too, so both are sent as state; so is one in
        whose midst hooks of others run, which would run once more when it is replayed."""
        outer = outer_call(self._index_of)
        if outer is not None and (outer != index or self._has_other_hooks(index)):
            self.log.discard()
            self._entangled |= {outer, index}
        return outer is not None

    def _has_other_hooks(self, index: int) -> bool:
        optimizer: Any = self.live.optimizers[index]
        found = {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks}
        found |= {*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks}
        return not found <= {self._pre_handles[index].id, *self._own_ids, *self._turn.hook_ids}

    def _log_call(self, index: int) -> None:
        self.outbox.patient = self.states.needs_patience
        with self._or_let_go():
            self.log.log(index)

    def _after_step(self, index: int) -> None:
        """The step is done: the call counts, and what it did to its atoms is no edit."""
        spec = self.live.census.optimizers[index]
        if self._is_nested(index):  # the outermost may still raise
            self.states.unlogged.update(spec.atoms if index in self._entangled else ())
            return
        self.copier.open_window()
        if self._letting_go or self.outgrown:
            self.log.skip(index)
            return
        if self._is_sent_as_state(index) or self._drew_random_numbers(spec):
            self.log.discard()
            self.states.unlogged.update(spec.atoms)
        self._watch.after_step(index)
        self.log.done(index)
        handle = self._pre_handles[index]
        if next(reversed(self.live.optimizers[index]._optimizer_step_pre_hooks)) != handle.id:
            handle.remove()  # stay the last to look at the gradients
            self._pre_handles[index] = self._register_pre(index, self.live.optimizers[index])

    def _drew_random_numbers(self, spec: OptimizerSpec) -> bool:
        """A step that did would draw others when it is replayed."""
        return spec.foreign and capture_rng() != self._rng_before

    # ------------------------------------------------------------------ seals

    @property
    def base_is_sent(self) -> bool:
        return not self.states.atoms_left

    def outgrow(self) -> None:
        """The last seal was too large, and is not sent."""
        self.outgrown = self._unsent = True

    @property
    def has_sent_all(self) -> bool:
        """Whether the last seal and all that it stands on are in the ring."""
        return self.flowing and self.base_is_sent and not self._unsent

    def send_base(self) -> None:
        """The next slice of what is queued to be based."""
        with self._or_let_go():
            self.states.base(self.log.gradient_bytes)

    def open(self) -> None:
        """Seal the state before the first step."""
        if not self.opened and self._opening is not None:
            self.seal(self.step, self._opening)

    def seal(self, step: int, moment: Moment) -> None:
        """End step `step`: edits, bases asked for, user state and random states, then the seal."""
        torn, self._torn = self._torn, True  # until it has come to its end
        if torn:
            self.let_go()  # nobody knows what is in the record and what is not: a new base tells
        with _no_collection():
            self._seal(step, moment)
        self._torn = False

    def has_sealed(self, step: int) -> bool:
        """Whether a seal that was interrupted is in the ring all the same."""
        return self.step == step or self._ring.last_is_sealed(step)

    def _seal(self, step: int, moment: Moment) -> None:
        self.log.discard()
        self.land()
        self.log.turn(step)
        self._begin(step)  # sealed again: what goes now is of that step, not of the next one
        again = self.opened and step == self.step
        if self.copier.sides and self.log.lifetime.pointless in _LOOK_OUTSIDE:
            point = self._guard(self._release_point)
            self._handles += points_outside(self.live.models, point)
        self.opened = True
        grown = self.live.groups_have_grown if self._letting_go else self.live.has_grown
        self.outgrown |= self.live.follow() or grown()
        self._unsent = self.outgrown
        if self.outgrown:
            return
        if self._letting_go:
            self._try_to_flow(step)
            return
        self._answer_requests(step)
        self.states.begin_seal(self.log.gradient_bytes)
        self.outbox.patient = self.states.needs_patience
        with self._or_let_go():
            self.states.changes(None, range(len(self.live.optimizers)), stays=True)
            self.states.unlogged_now()
            self.send_base()
            if self.flowing:
                self._send_seal(step, moment, again=again)
        if not self.flowing:
            self.dropped += 1
            self._ring.say_dropped(step)
        self.step = step
        self._begin(step + 1)
        if self.flowing and self.base_is_sent and not self._awake and self._rest.after_base(step):
            self._resting = True
            self.let_go()

    def _answer_requests(self, step: int) -> None:
        requested = self._ring.requested_atoms()
        if requested is None or requested:
            self._rebases += 1
            if requested is None:
                self._say_all_again()
            self.states.queue_base(requested)
            for atom in range(len(self.versions)) if requested is None else requested:
                self.versions[atom] = step  # the store may hold what the shadow had wrong

    def _send_seal(self, step: int, moment: Moment, *, again: bool) -> None:
        rng, state, groups = moment
        changed = (g if g != old else b"" for g, old in zip(groups, self._last_groups, strict=True))
        self.prints.turn()
        if self.base_is_sent and self.prints.is_due(step):
            self.prints.send(step)
        pending = self.pending.send(self._turn.consumed_by, again=again)
        seal = Seal(
            step=step,
            after=self.step,
            rng=rng,
            state=state if state != self._last_state else b"",
            groups=tuple(changed),
            time_ns=time.monotonic_ns(),
            metric=self._user_state.metric,
            pending=pending,
        )
        size = (
            len(rng)
            + len(seal.state)
            + sum(map(len, groups))
            + 3 * max(map(len, msgspec.structs.astuple(pending)))
        )
        self.outbox.room(0, size)
        self.outbox.add(seal)
        self.outbox.seal()
        self._last_state, self._last_groups, self._last_rng = state, list(groups), rng

    def nothing_happened(self) -> bool:
        """True if a seal now would say exactly what the last one said."""
        return (
            not self._turn.calls
            and capture_rng() == self._last_rng
            and self._user_state.collect() == self._last_state
            and not self.pending.changed()
            and not self._watch.differs()
        )

    def has_moved_on(self) -> bool:
        """Whether tensors, slots or gradients are no longer what the last seal saw."""
        gradients = self.pending.have_moved_on(self._turn.consumed_by)
        return gradients or self.live.follow() or self._watch.differs()

    # ------------------------------------------------------------------ letting go

    def _or_let_go(self) -> OrLetGo:
        return OrLetGo(self.let_go)

    def let_go(self, *, told: bool = False) -> None:
        """Stop recording; the shadow, once told, writes what it has and asks for a new base."""
        self._letting_go = True
        self.log.rest()
        self.states.forget()
        self.copier.state.forget_pieces()
        already = told and self.outbox.ticket is None  # nothing of a broken record is still open
        self._gap_told = already or self.outbox.abandon()

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Meanwhile a base is wanted, whatever the cadence says."""
        self._awake, self._resting = True, False
        try:
            yield
        finally:
            self._awake = False

    def _try_to_flow(self, step: int) -> None:
        """While letting go: tell the shadow, wait for its request, then begin with a new base."""
        self.dropped += not self._rest.periodic
        self._ring.say_dropped(step)
        self.step = step
        self.pending.turn()
        self._begin(step + 1)
        self.versions[:] = [step] * len(self.versions)
        if self._resting and self._rest.is_over(step):
            self._resting = False
        if not self._gap_told:
            self._gap_told = self.outbox.abandon()
        elif not self._resting and self._ring.requested_atoms() is None:
            self._letting_go = False
            self.log.go_on()
            self._say_all_again()
            self._watch.mark_all()
            self._rebases += 1
            self.states.forget()  # all of it goes with the base
            self.states.queue_base(fresh=True)

    def _say_all_again(self) -> None:
        """The shadow starts over, and may never have taken in what seals have said: the next one says it."""
        self._last_state = b""
        self._last_groups = [b""] * len(self._last_groups)

    @property
    def rebases(self) -> int:
        return self._rebases + self.log.rebases

    @property
    def flowing(self) -> bool:
        return not self._letting_go

    @property
    def resting(self) -> bool:
        """Nothing is recorded on purpose."""
        return self._letting_go and self._resting

    @property
    def dropping(self) -> bool:
        """Steps go unrecorded although every one should be."""
        return self._letting_go and not self._rest.periodic

    @property
    def rates(self) -> dict[str, Any]:
        """What the device link was measured to do, 0 where there is none; and if it is used early."""
        return {
            "early_tap": self.log.early_tap,
            "early_gradients": self.log.early_gradients,
            "snapshots": self.copier.state.snapshots,
            "fingerprint_every": self.prints.every,
            "unmoved_gradients": self.pending.unmoved,
            "link_bytes_per_second": self.copier.link_bytes_per_second,
            "window_seconds": self.copier.window_seconds,
        }

    @property
    def mode(self) -> tuple[str, str]:
        """What happens to this run's steps just now, and why."""
        if self._letting_go and self._rest.periodic:
            return "periodic", self._rest.why
        if self.dropping:
            return (
                "letting go",
                "the ring was full, or state changed while it was copied; recording goes on with a new base "
                'once the shadow has caught up (on_lag="wait" makes training wait instead)',
            )
        if not self.base_is_sent:
            left, steps = self.states.atoms_left, self.states.steps_left
            return (
                "basing",
                f"{left} of {len(self.versions)} atoms to be sent, in about {steps} steps",
            )
        return "every step", "every step is recorded"


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Sending state makes thousands of objects that are gone a moment later. A collection that finds them
    alive moves them to the oldest generation, and a full one soon stops training for a tenth of a second."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
