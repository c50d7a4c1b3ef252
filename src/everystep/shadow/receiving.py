"""Takes records in, and starts over from a new base where it is doubtful what was taken in."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from everystep.core.roles import RoleEvent
from everystep.shadow.base_scheduler import BaseScheduler
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.faults import START_OVER_MAX, Faults
from everystep.shadow.intake import Intake
from everystep.shadow.succession import Succession
from everystep.shadow.threads import guarded

_BATCH_SECONDS = 0.05  # of taking records in between two looks at the control channel


class Receiver:
    """Owned by the main thread."""

    def __init__(
        self,
        intake: Intake,
        base_scheduler: BaseScheduler,
        base_writer: BaseWriter,
        succession: Succession,
        faults: Faults,
    ) -> None:
        self.intake, self._succession, self.faults = intake, succession, faults
        self._base_scheduler, self._base_writer = base_scheduler, base_writer
        self.distrusted = False  # something of ours failed: the replica is to be given up

    @property
    def drained(self) -> bool:
        """Everything the trainer sealed has been replayed, also what came since the ring was read."""
        waits = self.intake.record_waits or self.intake.ring.readable
        return not waits and not self.intake.gap

    @property
    def sound(self) -> bool:
        """The replica is a complete state that training had."""
        return self.intake.whole and not self.distrusted and not self.intake.drifted

    @property
    def lacks_state(self) -> bool:
        """Only the trainer has what is wrong here, or not here: it sends that with its next seal."""
        return bool(self.intake.drifted) or not self.intake.whole or self.intake.waits_for_base

    @property
    def finished(self) -> dict[str, Any]:
        return {"finished_step": max(self.intake.sealed_step, self.intake.ring.dropped_step)}

    def receive(self, *, waited_for: bool) -> bool:
        """Take in what there is, for a moment; True if there was something. `waited_for`: somebody waits for
        the newest state, so that no records are let come together."""
        if self.distrusted:
            if self._base_writer.reads_snapshot:
                return False  # it may be reading what would be overwritten
            self.intake.forget()
            self._base_scheduler.wanted = None
            self.distrusted = False
        took = self._take_in(waited_for=waited_for)
        if not self.distrusted:
            self._look_after_gap()
        return took

    def _take_in(self, *, waited_for: bool) -> bool:
        scheduler, succession = self._base_scheduler, self._succession
        may_apply = succession.may_change_memory
        patient = succession.trainer_lives and not waited_for and not succession.terminated
        took, deadline = False, time.monotonic() + _BATCH_SECONDS
        while time.monotonic() < deadline:
            scheduler.look_after_copy()
            base = scheduler.wanted
            may_apply = may_apply and not scheduler.holds_still
            waits = patient and base is None and not self.intake.gap
            take = partial(self.intake.take, may_apply=may_apply, patient=waits, base=base)
            if not guarded(take, self._start_over):
                break
            took = True
        return took

    def _start_over(self, error: Exception) -> bool:
        """A record could not be taken in, or half of it was replayed."""
        trainer_lives, intake = self._succession.trainer_lives, self.intake
        if not trainer_lives and intake.whole and not intake.in_doubt:
            self.faults.failed(error)
            intake.stay()  # what cannot be read was the last that came
            return False
        self.faults.replica_in_doubt(error)
        self.distrusted = True
        if self.faults.starts_over > START_OVER_MAX or not trainer_lives:
            self._succession.happens(RoleEvent.ENDS, "the replica is in doubt")
        return False

    def _look_after_gap(self) -> None:
        intake, scheduler = self.intake, self._base_scheduler
        kept = intake.whole and not intake.drifted and intake.waits_for_base
        if kept and not self._succession.trainer_lives:
            intake.stay()  # nobody sends a base
        elif intake.gap and not intake.record_waits and scheduler.save_before_reset():
            intake.forget(keep=scheduler.has_news)
