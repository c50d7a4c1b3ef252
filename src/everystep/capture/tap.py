"""The tap: hooks on the optimizers that log what each step consumed, and the seal that ends a step.

All of it runs on the training thread. What cannot be logged as a gradient (a sparse one, one that a
later hook may still change) is sent as state instead: re-base is the one repair for everything.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from everystep.capture.census import LiveCensus, has_grown
from everystep.capture.copier import Copier
from everystep.capture.outbox import LetGo, Outbox
from everystep.capture.rng import capture_rng
from everystep.capture.state import UserState
from everystep.capture.watch import Watch
from everystep.core.census import Mode, gradient_layout
from everystep.core.events import Call, Rebase, Seal, SlotValues, pack_presence, unpack_presence
from everystep.format import values
from everystep.lane.ring import RingWriter
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
    ) -> None:
        self.live = live
        self.step = step
        self.versions = versions
        self.outgrown = False  # the census is no longer true: a new tap is needed
        self.dropped = 0
        self.rebases = 0
        self.edits = 0  # tensors sent because something changed them outside step()
        self._ring = ring
        self._copier = Copier(ring, {t.device for t in live.tensors})
        self.outbox = Outbox(ring, self._copier, may_wait)
        self._watch = Watch(live)
        self._user_state = user_state
        self._layouts = [gradient_layout(live.census, i) for i in range(len(live.optimizers))]
        self._pending: tuple[Call, int] | None = None
        self._resend: set[int] = set()
        self._queue: list[tuple[int, ...]] = []  # atoms still to be based, in units
        self._letting_go = False
        self._gap_told = False
        self._last_state = self._last_rng = b""
        self._last_groups = [b""] * len(live.optimizers)
        self._handles: list[Any] = []
        self._pre_handles: list[Any] = []
        self._guard = guard
        self._target = step  # the step that the record being filled will be sealed as
        self.opened = False
        self.opening_rng: bytes | None = None
        self.calls = 0  # optimizer calls since the last seal
        self.outbox.begin(step)

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

    def _register_pre(self, index: int, optimizer: torch.optim.Optimizer) -> Any:
        before = partial(self._guard(self._before_step), index)
        return optimizer.register_step_pre_hook(lambda _, args, kwargs: before(args, kwargs))

    def remove(self) -> None:
        for handle in (*self._handles, *self._pre_handles):
            handle.remove()
        self._handles, self._pre_handles = [], []
        self._copier.close()

    def _before_step(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Log the call, or see to it that it is logged when its gradients are there."""
        self._pending = None
        spec = self.live.census.optimizers[index]
        if self._letting_go or self.outgrown or spec.mode is Mode.STATE:
            return None
        if has_grown(self.live):
            self.outgrown = True
            return None
        if not self.opened:  # a loop that is not ours: the state before its first step counts too
            self.seal(self.step, rng=self.opening_rng)
        hooks = self.live.optimizers[index]._optimizer_step_pre_hooks
        if next(reversed(hooks)) != self._pre_handles[index].id:
            self._resend.update(spec.atoms)  # a later hook may still change the gradients
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
        grads = [live.tensors[atom].grad for atom in spec.atoms]
        loggable = all(
            _loggable(g, live.tensors[a]) for g, a in zip(grads, spec.atoms, strict=True)
        )
        if not loggable or self._watch.lost_slots(index):
            self._resend.update(spec.atoms)
            return
        with self._or_let_go():
            self._send_changes(spec.atoms, [index])
            groups, amp = self._groups(index), self._amp(index)
            offsets, size = self._layouts[index]
            presence = pack_presence([g is not None for g in grads])
            at = self.outbox.room(size, len(groups) + len(amp) + len(presence))
            self._copier.gradients(self.outbox.address(at), index, offsets, grads)
            self._pending = (Call(index, groups, presence, at, amp), at)

    def _after_step(self, index: int) -> None:
        """The step is done: the call counts, and what it did to its atoms is no edit."""
        spec = self.live.census.optimizers[index]
        self.calls += 1
        if self._letting_go or self.outgrown:
            return
        if spec.mode is Mode.STATE:
            self._resend.update(spec.atoms)
        if self._pending is not None:
            call, self._pending = self._pending[0], None
            self.outbox.add(call)
            present = unpack_presence(call.presence, len(spec.atoms))
            for atom, there in zip(spec.atoms, present, strict=True):
                if there:
                    self.versions[atom] = self._target
        self._watch.after_step(index)
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

    def _amp(self, index: int) -> bytes:
        optimizer = self.live.optimizers[index]
        found = {n: getattr(optimizer, n, None) for n in ("grad_scale", "found_inf")}
        there = {n: t for n, t in found.items() if t is not None}
        return values.encode(there, "amp", pack) if there else b""

    # ------------------------------------------------------------------ seals and bases

    def queue_base(self, atoms: Iterable[int] | None = None) -> None:
        """Have these atoms (None: all) based anew, some at every seal; log atoms go together."""
        wanted = set(range(len(self.live.tensors))) if atoms is None else set(atoms)
        together = {a for s in self.live.census.optimizers if s.mode is Mode.LOG for a in s.atoms}
        queued = {a for unit in self._queue for a in unit}
        if wanted & together:
            self._queue = [u for u in self._queue if not together & set(u)]
            self._queue.insert(0, tuple(sorted(together)))
        self._queue += [(a,) for a in sorted(wanted - together - queued)]

    def send_base(self) -> None:
        """Send queued atoms as long as half the ring stays free for records."""
        sent: list[int] = []
        with self._or_let_go():
            while self._queue and (not sent or 2 * self._ring.free >= self._ring.geometry.slots):
                for atom in self._queue.pop(0):
                    self._send_atom(atom)
                    sent.append(atom)
            if sent:
                self.outbox.room(0, 16 * len(sent))
                self.outbox.add(Rebase(tuple(sent), tuple(self.versions[a] for a in sent)))

    @property
    def base_is_sent(self) -> bool:
        return not self._queue

    def seal(self, step: int, *, rng: bytes | None = None) -> None:
        """End step `step`: edits, bases asked for, user state and random states, then the seal."""
        self._discard_pending()
        self.opened = True
        self.calls = 0
        self.outgrown |= self.live.follow() or has_grown(self.live)
        if self.outgrown:
            return
        if self._letting_go:
            self._try_to_flow(step)
            return
        requested = self._ring.requested_atoms()
        if requested is None or requested:
            self.rebases += 1
            self.queue_base(requested)
            for atom in range(len(self.versions)) if requested is None else requested:
                self.versions[atom] = step  # the store may hold what the shadow had wrong
        for index, spec in enumerate(self.live.census.optimizers):
            if self._watch.lost_slots(index):
                self._resend.update(spec.atoms)
        with self._or_let_go():
            self._send_changes(None, range(len(self.live.optimizers)))
            self._send_resend()
            self.send_base()
            if self.flowing:
                self._send_seal(step, capture_rng() if rng is None else rng)
        if not self.flowing:
            self.dropped += 1
        self.step = step
        self._target = step + 1
        self.outbox.begin(self._target)

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

    def _send_changes(self, atoms: Iterable[int] | None, optimizers: Iterable[int]) -> None:
        """What changed outside step(), unless its whole state is sent at this seal anyway."""
        values_edited = [a for a in self._watch.edited_values(atoms) if a not in self._resend]
        self._send_edits(values_edited)
        atoms_of = self.live.census.atoms
        self.edits += sum(not atoms_of[a].buffer for a in values_edited)
        for index in optimizers:
            edited = [a for a in self._watch.edited_slots(index) if a not in self._resend]
            self._send_slots(index, edited)
            self.edits += len(edited)

    def _send_edits(self, atoms: list[int]) -> None:
        for atom in atoms:
            self.outbox.tensor(atom, "", self.live.tensors[atom])
            self.versions[atom] = self._target

    def _send_slots(self, index: int, atoms: list[int]) -> None:
        prefix = self.live.census.optimizers[index].key + "/"
        for atom in atoms:
            others: dict[str, Any] = {}
            for name, value in self.live.state_of(index, atom).items():
                if isinstance(name, str) and isinstance(value, torch.Tensor):
                    self.outbox.tensor(atom, prefix + name, value)
                else:
                    others[name] = value
            if others:
                encoded = values.encode(others, f"optimizer state of atom {atom}", pack)
                self.outbox.room(0, len(encoded))
                self.outbox.add(SlotValues(atom, index, encoded))
            self.versions[atom] = self._target

    def _send_atom(self, atom: int) -> None:
        """Everything there is of one atom, without touching its version."""
        version = self.versions[atom]
        self._send_edits([atom])
        for index, spec in enumerate(self.live.census.optimizers):
            if atom in spec.atoms:
                self._send_slots(index, [atom])
        self.versions[atom] = version

    def _send_resend(self) -> None:
        """Atoms whose step could not be logged: their whole state, as it is now."""
        if self._resend:
            for atom in self._resend:
                self.versions[atom] = self._target
            self.queue_base(self._resend)
            first = {u for u in self._queue if self._resend & set(u)}
            now = [u for u in self._queue if u in first]
            self._queue = [u for u in self._queue if u not in first]
            sent = tuple(atom for unit in now for atom in unit)
            for atom in sent:
                self._send_atom(atom)
            self.outbox.room(0, 16 * len(sent))
            self.outbox.add(Rebase(sent, tuple(self.versions[a] for a in sent)))
            self._resend.clear()

    def nothing_happened(self) -> bool:
        """True if a seal now would say exactly what the last one said."""
        return (
            not self.calls
            and capture_rng() == self._last_rng
            and self._user_state.collect() == self._last_state
            and not self._watch.differs()
        )

    # ------------------------------------------------------------------ letting go

    @contextlib.contextmanager
    def _or_let_go(self) -> Iterator[None]:
        try:
            yield
        except LetGo:
            self.let_go()

    def let_go(self) -> None:
        """Stop recording; the shadow writes what it has, then asks for a new base."""
        self._letting_go = True
        self._pending = None
        self._resend.clear()
        self._queue.clear()
        self._gap_told = self.outbox.abandon()

    def _try_to_flow(self, step: int) -> None:
        """While letting go: tell the shadow, wait for its request, then begin with a new base."""
        self.dropped += 1
        self.step = step
        self._target = step + 1
        self.outbox.begin(self._target)
        for atom in range(len(self.versions)):
            self.versions[atom] = step
        if not self._gap_told:
            self._gap_told = self.outbox.abandon()
        elif self._ring.requested_atoms() is None:
            self._letting_go = False
            self._last_state = b""
            self._last_groups = [b""] * len(self._last_groups)
            self._watch.mark_all()
            self.rebases += 1
            self.queue_base()

    @property
    def flowing(self) -> bool:
        return not self._letting_go


def _loggable(gradient: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    return gradient is None or (
        gradient.layout is torch.strided
        and gradient.dtype == parameter.dtype
        and gradient.shape == parameter.shape
    )
