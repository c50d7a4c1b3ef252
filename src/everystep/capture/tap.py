"""The tap: hooks on the optimizers that log what each step consumed, and the seal that ends a step.

All of it runs on the training thread. What cannot be logged as a gradient (a sparse one, one that a
later hook may still change) is sent as state instead: re-base is the one repair for everything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from everystep.capture.census import LiveCensus, has_grown, release_modules
from everystep.capture.copier import Copier
from everystep.capture.lifetime import POINTS_MAX, GradientLifetime
from everystep.capture.outbox import LetGo, Outbox
from everystep.capture.rng import capture_rng
from everystep.capture.state import UserState
from everystep.capture.states import StateSender
from everystep.capture.watch import Watch
from everystep.core.cadence import Rest
from everystep.core.census import ALIGN_BYTES, Mode, gradient_layout
from everystep.core.events import AMP_BYTES, Call, Seal, pack_presence, unpack_presence
from everystep.format import values
from everystep.lane.ring import RingWriter
from everystep.replay.optimizers import rewrites_gradients
from everystep.replay.tensors import pack

_FINGERPRINT_EVERY = 64
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class Tap:
    """One lane's worth of recording: a census, a ring and the hooks. Made anew when either changes."""

    def __init__(
        self,
        live: LiveCensus,
        ring: RingWriter,
        user_state: UserState,
        *,
        step: int,
        versions: list[int],
        guard: Guard,
        may_wait: Callable[[float], bool],
        rest: Rest,
        budget_percent: float,
    ) -> None:
        self.live = live
        self.step = step
        self.versions = versions
        self.outgrown = False  # the census is no longer true: a new tap is needed
        self.dropped = 0
        self.rebases = 0
        self._ring = ring
        self.copier = Copier(ring, {t.device for t in live.tensors})
        self.outbox = Outbox(ring, self.copier, may_wait)
        self._lifetime = GradientLifetime(self.copier)
        self._watch = Watch(live)
        self.states = StateSender(
            live, ring, self.outbox, self.copier, self._watch, versions, budget_percent
        )
        self._rest = rest
        self._user_state = user_state
        self._layouts = [gradient_layout(live.census, i) for i in range(len(live.optimizers))]
        self._parameters = [[live.tensors[a] for a in s.atoms] for s in live.census.optimizers]
        self._usual: list[Any] = [None] * len(live.optimizers)  # kinds of gradients seen last
        self._pending: tuple[Call, int] | None = None
        self._letting_go = False
        self._resting = False  # letting go on purpose, until the next base is wanted
        self._awake = False
        self._gap_told = False
        self._last_state = self._last_rng = b""
        self._last_groups = [b""] * len(live.optimizers)
        self._handles: list[Any] = []
        self._pre_handles: list[Any] = []
        self._guard = guard
        self.opened = False
        self.opening_rng: bytes | None = None
        self.calls = 0  # optimizer calls since the last seal
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
        if self.copier.sides:
            point = self._guard(self._release_point)

            def at_module(*_: object) -> None:
                if not torch.compiler.is_compiling():
                    point()

            for module in release_modules(self.live.models, POINTS_MAX):
                self._handles.append(module.register_forward_pre_hook(at_module))

    def _register_pre(self, index: int, optimizer: torch.optim.Optimizer) -> Any:
        before = partial(self._guard(self._before_step), index)
        return optimizer.register_step_pre_hook(lambda _, args, kwargs: before(args, kwargs))

    def remove(self) -> None:
        for handle in (*self._handles, *self._pre_handles):
            handle.remove()
        self._handles, self._pre_handles = [], []
        self.land()
        self.copier.close()

    def _release_point(self) -> None:
        """A module computes next: memory may be needed, and copies may be done meanwhile."""
        self._lifetime.release_point()
        if not self.states.settle_if_landed():
            self.let_go(told=True)

    def land(self) -> None:
        """State may change from here on, or must be in the ring now."""
        if not self.states.land():
            self.let_go(told=True)

    def _before_step(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Log the call, or see to it that it is logged when its gradients are there."""
        self._discard_pending()
        if not self.calls:
            self.copier.close_window()
            self.copier.release()  # what no release point came by for
        self.land()
        spec = self.live.census.optimizers[index]
        if self._letting_go or self.outgrown or spec.mode is Mode.STATE:
            return None
        if has_grown(self.live):
            self.outgrown = True
            return None
        if not self.opened:  # a loop that is not ours: the state before its first step counts too
            self.seal(self.step, rng=self.opening_rng)
            self.land()
        hooks = self.live.optimizers[index]._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self._pre_handles[index].id:
            self.states.unlogged.update(spec.atoms)  # a later hook may still change the gradients
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._log_call(index)
            return None
        return self._with_closure(index, closure, args, kwargs)

    def _with_closure(
        self, index: int, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        log = self._guard(self._log_call)

        def closure_then_tap() -> Any:
            result = closure()
            log(index)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_then_tap}
        return (args[0], closure_then_tap, *args[2:]), kwargs

    def _log_call(self, index: int) -> None:
        """Copy the gradients as the optimizer will see them, with every scalar it uses."""
        live, spec = self.live, self.live.census.optimizers[index]
        self._discard_pending()
        grads = [parameter.grad for parameter in self._parameters[index]]
        if not self._lifetime.look(index, grads):
            self.rebases += 1  # the last record may hold what was written into them since
            self.states.queue_base(range(len(self.versions)))
        if not self._loggable(index, grads):
            self.states.unlogged.update(spec.atoms)
        with self._or_let_go():
            self.states.changes(spec.atoms, [index], stays=False)
            if not self.states.unlogged.isdisjoint(spec.atoms):
                return  # their whole state goes with the seal
            groups, layout = self._groups(index), self._layouts[index]
            presence = pack_presence([g is not None for g in grads])
            at = self.outbox.room(layout.bytes + AMP_BYTES, len(groups) + len(presence) + 64)
            amp = self._send_amp(index, at + layout.bytes)
            self.copier.send_pieces()
            if baseless := self.states.baseless:
                grads = [
                    None if a in baseless else g for a, g in zip(spec.atoms, grads, strict=True)
                ]
            self.copier.gradients(self.outbox.address(at), index, layout, grads)
            if rewrites_gradients(live.optimizers[index]):
                self.copier.release()
            self._pending = (Call(index, groups, presence, at, amp), at)

    def _loggable(self, index: int, grads: list[torch.Tensor | None]) -> bool:
        """Whether every gradient that is there has the kind, type and shape of its parameter."""
        there = [(g.layout, g.dtype, g.shape) for g in grads if g is not None]
        if there == self._usual[index]:
            return True
        expected = [
            (torch.strided, p.dtype, p.shape)
            for g, p in zip(grads, self._parameters[index], strict=True)
            if g is not None
        ]
        self._usual[index] = expected
        return there == expected

    def _after_step(self, index: int) -> None:
        """The step is done: the call counts, and what it did to its atoms is no edit."""
        spec = self.live.census.optimizers[index]
        self.calls += 1
        self.copier.open_window()
        if self._letting_go or self.outgrown:
            self.copier.release()
            return
        if spec.mode is Mode.STATE:
            self.states.unlogged.update(spec.atoms)
        if self._pending is not None:
            call, self._pending = self._pending[0], None
            self.outbox.add(call)
            present = unpack_presence(call.presence, len(spec.atoms))
            for atom, there in zip(spec.atoms, present, strict=True):
                if there:
                    self.versions[atom] = self.states.target
        self._watch.after_step(index)
        self._lifetime.after_step(index)
        handle = self._pre_handles[index]
        if next(reversed(self.live.optimizers[index]._optimizer_step_pre_hooks)) != handle.id:
            handle.remove()  # stay the last to look at the gradients
            self._pre_handles[index] = self._register_pre(index, self.live.optimizers[index])

    def _discard_pending(self) -> None:
        """A call whose step raised, or whose closure ran again, never happened."""
        if self._pending is not None:
            self.outbox.unroom(self._pending[1])
            self._pending = None

    def _groups(self, index: int) -> bytes:
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.live.optimizers[index].param_groups
        ]
        key = self.live.census.optimizers[index].key
        return values.encode(groups, f"optimizer[{key!r}].param_groups", pack)

    def _send_amp(self, index: int, at: int) -> dict[str, int]:
        """What a GradScaler told the optimizer; it lies on the device, so it travels as bytes."""
        found: dict[str, int] = {}
        for name in ("grad_scale", "found_inf"):
            tensor = getattr(self.live.optimizers[index], name, None)
            if tensor is not None:
                scalar = tensor.detach().to(torch.float32).view(-1)
                self.copier.piece(self.outbox.address(at), scalar, 0, 4, stays=False)
                found[name] = at
                at += ALIGN_BYTES
        return found

    # ------------------------------------------------------------------ seals

    @property
    def base_is_sent(self) -> bool:
        return not self.states.atoms_left

    def send_base(self) -> None:
        """The next slice of what is queued to be based."""
        with self._or_let_go():
            self.states.base(max((layout.bytes for layout in self._layouts), default=0))

    def seal(self, step: int, *, rng: bytes | None = None) -> None:
        """End step `step`: edits, bases asked for, user state and random states, then the seal."""
        self._discard_pending()
        self.land()
        self._lifetime.turn()
        self.opened = True
        self.calls = 0
        self.outgrown |= self.live.follow() or has_grown(self.live)
        if self.outgrown:
            return
        if self._letting_go:
            self._try_to_flow(step)
            return
        self._answer_requests(step)
        with self._or_let_go():
            self.states.changes(None, range(len(self.live.optimizers)), stays=True)
            self.states.unlogged_now()
            self.send_base()
            if self.flowing:
                self._send_seal(step, capture_rng() if rng is None else rng)
        if not self.flowing:
            self.dropped += 1
        self.step = step
        self._begin(step + 1)
        if self.flowing and self.base_is_sent and not self._awake and self._rest.after_base(step):
            self._resting = True
            self.let_go()

    def _answer_requests(self, step: int) -> None:
        requested = self._ring.requested_atoms()
        if requested is None or requested:
            self.rebases += 1
            self.states.queue_base(requested)
            for atom in range(len(self.versions)) if requested is None else requested:
                self.versions[atom] = step  # the store may hold what the shadow had wrong

    def _send_seal(self, step: int, rng: bytes) -> None:
        state = self._user_state.collect()
        groups = [self._groups(i) for i in range(len(self.live.optimizers))]
        changed = (g if g != old else b"" for g, old in zip(groups, self._last_groups, strict=True))
        every = step <= 2 or step % _FINGERPRINT_EVERY == 0
        prints = self._watch.fingerprints() if every and self.base_is_sent else {}
        seal = Seal(
            step=step,
            after=self.step,
            rng=rng,
            state=state if state != self._last_state else b"",
            groups=tuple(changed),
            fingerprints=prints,
            time_ns=time.time_ns(),
        )
        size = len(rng) + len(seal.state) + sum(map(len, groups)) + 20 * len(prints)
        self.outbox.room(0, size)
        self.outbox.add(seal)
        self.outbox.seal()
        self._last_state, self._last_groups, self._last_rng = state, groups, rng

    def nothing_happened(self) -> bool:
        """True if a seal now would say exactly what the last one said."""
        return (
            not self.calls
            and capture_rng() == self._last_rng
            and self._user_state.collect() == self._last_state
            and not self._watch.differs()
        )

    # ------------------------------------------------------------------ letting go

    def _or_let_go(self) -> _OrLetGo:
        return _OrLetGo(self)

    def let_go(self, *, told: bool = False) -> None:
        """Stop recording; the shadow, once told, writes what it has and asks for a new base."""
        self._letting_go = True
        self._pending = None
        self.states.forget()
        self._gap_told = told or self.outbox.abandon()

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
        self.step = step
        self._begin(step + 1)
        for atom in range(len(self.versions)):
            self.versions[atom] = step
        if self._resting and self._rest.is_over(step):
            self._resting = False
        if not self._gap_told:
            self._gap_told = self.outbox.abandon()
        elif not self._resting and self._ring.requested_atoms() is None:
            self._letting_go = False
            self._last_state = b""
            self._last_groups = [b""] * len(self._last_groups)
            self._watch.mark_all()
            self.rebases += 1
            self.states.queue_base()

    @property
    def flowing(self) -> bool:
        return not self._letting_go

    @property
    def rates(self) -> dict[str, float]:
        """What the device link was measured to do; 0 where there is none."""
        return {
            "link_bytes_per_second": self.copier.link_bytes_per_second,
            "window_seconds": self.copier.window_seconds,
        }

    @property
    def mode(self) -> tuple[str, str]:
        """What happens to this run's steps just now, and why."""
        if self._resting:
            return "periodic", self._rest.why
        if self._letting_go:
            return "letting go", "the ring was full: the shadow has to take what it holds first"
        if not self.base_is_sent:
            return "basing", f"{self.states.atoms_left} of {len(self.versions)} atoms to be sent"
        return "every step", "every step is recorded"


class _OrLetGo:
    """Around what may find the ring full."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> bool:
        if not isinstance(error, LetGo):
            return False
        # a traceback holds frames, and those of the user's step hold its largest tensors
        error.__traceback__ = None
        self._tap.let_go()
        return True
