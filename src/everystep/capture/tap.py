"""The tap: records every step into one ring, from the seal before the first step to the ring's end.

All of it runs on the training thread. `hooks.py` logs what each step consumes, this file ends steps.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from everystep.capture.copying.early import Guard
from everystep.capture.hooks import StepHooks
from everystep.capture.record import OpenRecord
from everystep.capture.seals import SealSender
from everystep.capture.subject import Subject
from everystep.capture.turn import SealedValues
from everystep.capture.versions import Versions
from everystep.core.cadence import RestBetweenBases
from everystep.core.phases import Cause, Phase
from everystep.lane.ring import RingWriter


class Tap:
    """Of one census and one ring. Another one is made when either changes."""

    def __init__(
        self,
        subject: Subject,
        ring: RingWriter,
        *,
        step: int,
        versions: Versions,
        guard: Guard,
        may_wait: Callable[[float, bool], bool],
        rest: RestBetweenBases,
        budget_percent: float,
        fingerprint_every: int,
    ) -> None:
        self.step = step
        self.dropped = 0
        self.record = OpenRecord(
            subject.live,
            ring,
            versions,
            subject.suspicions,
            guard=guard,
            may_wait=may_wait,
            budget_percent=budget_percent,
        )
        self.hooks = StepHooks(self.record, subject.turn, guard, self.open)
        self.seals = SealSender(self.record, subject, fingerprint_every)
        self._ring = ring
        self._rest = rest
        self._first = subject.turn.sealed  # what the seal says that comes before the first step
        self._in_seal = False  # if it is when a seal begins, the last one was interrupted
        self.record.begin(step)

    @property
    def phase(self) -> Phase:
        return self.record.phase

    def remove(self) -> None:
        self.hooks.remove()
        self.record.close()

    def outgrow(self) -> None:
        """The record is too large for this ring, and is not sent. A closure may find that twice."""
        if self.phase is not Phase.OUTGROWN:
            self.record.move(Cause.OUTGROW)

    # ------------------------------------------------------------------ seals

    @property
    def opened(self) -> bool:
        return self._first is None

    def open(self) -> None:
        """Seal the state before the first step."""
        if self._first is not None:
            self.seal(self.step, self._first)

    def has_sealed(self, step: int) -> bool:
        """Whether a seal that was interrupted is in the ring all the same."""
        return self.step == step or self._ring.last_is_sealed(step)

    def seal(self, step: int, values: SealedValues, *, is_awaited: bool = False) -> None:
        """End step `step`: edits, bases asked for, user state and random states, then the seal.
        `is_awaited`: somebody waits for a base, whatever the cadence says."""
        interrupted, self._in_seal = self._in_seal, True
        if is_awaited and self.phase is Phase.RESTING:
            self.record.move(Cause.WAKE)
        if interrupted:  # nobody knows what is in the record and what is not: a new base tells
            self.record.drop()
        with _no_collection():
            again = self.opened and step == self.step
            self._end_calls(step)
            if self._is_outgrown():
                pass
            elif self.phase.pauses:
                self._drop(step)
            else:
                self._send(step, values, again=again)
                self._rest_after_base(step, is_awaited=is_awaited)
        self._in_seal = False

    def _end_calls(self, step: int) -> None:
        record = self.record
        record.calls.discard()
        record.land()
        record.calls.turn(step)
        record.begin(step)  # sealed again: what goes now is of that step, not of the next one
        self.hooks.look_outside()
        self._first = None

    def _is_outgrown(self) -> bool:
        if self.phase is Phase.OUTGROWN:
            return True
        live = self.record.live
        grown = live.groups_have_grown if self.phase.pauses else live.has_grown
        if not live.follow() and not grown():
            return False
        self.record.move(Cause.OUTGROW)
        return True

    def _send(self, step: int, values: SealedValues, *, again: bool) -> None:
        record = self.record
        self._answer_request(step)
        record.states.begin_seal(record.calls.gradient_bytes)
        record.outbox.patient = record.bases.needs_patience
        with record.or_drop():
            record.states.changes(None, range(len(record.live.optimizers)), stays=True)
            record.states.unlogged_now()
            record.send_base()
            if record.phase.records:
                self.seals.send(step, values, after=self.step, again=again)
        if record.phase.records:
            record.move(Cause.SEAL if record.bases.atoms_left else Cause.COMPLETE)
        else:  # the ring was full, or state was torn while the seal was filled
            self.dropped += 1
            self._ring.say_dropped(step)
        self.step = step
        record.begin(step + 1)

    def _answer_request(self, step: int) -> None:
        requested = self._ring.requested_atoms()
        if requested is None:
            self.seals.say_all_again()
        if requested is None or requested:
            self.record.rebase(requested)
            # the store may hold what the shadow had wrong
            self.record.versions.change(requested, step)

    def _rest_after_base(self, step: int, *, is_awaited: bool) -> None:
        complete = self.phase is Phase.RECORDING
        if complete and not is_awaited and self._rest.after_base(step):
            self.record.rest()

    def _drop(self, step: int) -> None:
        """Drop the step. Tell the shadow, wait for its request, then begin with a new base."""
        record = self.record
        self.dropped += not self._rest.periodic
        self._ring.say_dropped(step)
        self.step = step
        self.seals.skip()
        record.begin(step + 1)
        record.versions.change(None, step)
        if self.phase is Phase.RESTING and self._rest.is_over(step):
            record.move(Cause.WAKE)
        if record.outbox.owes_gap:
            record.outbox.tell_gap()
        elif self.phase is Phase.DROPPING and self._ring.requested_atoms() is None:
            record.states.forget()  # all of it goes with the base
            record.watch.mark_all()
            self.seals.say_all_again()
            record.rebase(fresh=True)
            record.calls.go_on()

    # ------------------------------------------------------------------ what becomes of steps

    @property
    def is_dropping(self) -> bool:
        """Steps go unrecorded although every one should be."""
        return self.phase.pauses and not self._rest.periodic

    @property
    def mode(self) -> tuple[str, str]:
        """What happens to this run's steps just now, and why."""
        if self.is_dropping:
            return (
                "dropping",
                "the ring was full, or state changed while it was copied; recording goes on with a new base "
                'once the shadow has caught up (on_lag="wait" makes training wait instead)',
            )
        if self.phase.pauses:
            return "periodic", self._rest.why
        bases = self.record.bases
        if bases.atoms_left:
            return (
                "basing",
                f"{bases.atoms_left} of {len(self.record.versions)} atoms to be sent, in about "
                f"{bases.steps_left} steps",
            )
        return "every step", "every step is recorded"

    @property
    def rates(self) -> dict[str, Any]:
        """What the device link was measured to do, 0 where there is none; and if it is used early."""
        record = self.record
        return {
            "early_tap": record.calls.early_tap,
            "early_gradients": record.calls.early_gradients,
            "snapshots": record.copier.state.snapshots,
            "link_bytes_per_second": record.copier.link_bytes_per_second,
            "window_seconds": record.copier.window_seconds,
            **self.seals.rates,
        }


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
