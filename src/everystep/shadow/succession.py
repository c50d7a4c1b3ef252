"""Who speaks for the run: this shadow, the one before it, or the one behind it; and when this one goes."""

from __future__ import annotations

import logging
import time

from everystep.core.roles import ForbiddenTransition, Role, RoleEvent, advance
from everystep.lane.control import AskDefer
from everystep.lane.host import process_start
from everystep.lane.runtime import is_alive
from everystep.process.config import ShadowConfig
from everystep.process.watch import ProcessWatch
from everystep.shadow.faults import Faults
from everystep.shadow.presence import Presence

log = logging.getLogger(__name__)

_GIVE_UP_IDLES = 10  # a store that fails for this many idle times is not waited for any longer


class Succession:
    """Owned by the main thread, but for `terminated`, which a signal sets."""

    def __init__(self, config: ShadowConfig, presence: Presence, faults: Faults) -> None:
        self._presence, self._faults = presence, faults
        self.role = Role.FOLLOWING
        self.ended_by: RoleEvent | None = None  # why it is leaving
        self.ended_well = False  # the trainer goes on with another shadow, or has closed the run
        self.terminated = False  # it was asked to write what it holds, and to go
        self.trainer = ProcessWatch(config.trainer_pid, config.trainer_start)
        self._gone_at: float | None = None  # since when there is no trainer
        self._before = config.predecessor  # until it is gone
        self._adopts = config.adopted is not None
        self._heir: AskDefer | None = None

    def happens(self, event: RoleEvent, why: str = "") -> None:
        """The only place where the role changes."""
        try:
            role = advance(self.role, event)
        except ForbiddenTransition as error:
            self._faults.failed(error)
            return
        if self.role is Role.LEAVING:
            return
        log.info("role from=%s event=%s to=%s%s", self.role, event, role, f" {why}" if why else "")
        if role is Role.LEAVING:
            self.ended_by = event
            self.ended_well = self.trainer_lives and event in (RoleEvent.RETIRED, RoleEvent.CLOSED)
        self.role = role

    # ------------------------------------------------------------------ what is known

    @property
    def trainer_lives(self) -> bool:
        return self._gone_at is None

    @property
    def alone(self) -> bool:
        """No other shadow may write into this run's store, or into the memory that we adopted from it."""
        return self._before is None

    @property
    def speaks(self) -> bool:
        """Our card is the run's."""
        return self.role in (Role.SPEAKING, Role.ORPHANED, Role.YIELDED)

    @property
    def owns_memory(self) -> bool:
        return self.alone or not self._adopts

    @property
    def may_change_memory(self) -> bool:
        return self.owns_memory and self.role is not Role.YIELDED

    @property
    def has_heir(self) -> bool:
        """A successor lives: it retires us as soon as it holds the state, or leaves it to us."""
        heir = self._heir
        return heir is not None and process_start(heir.pid) == heir.start

    @property
    def is_retired(self) -> bool:
        """The card, and what is still to be sent, are another shadow's business."""
        return self.ended_by is RoleEvent.RETIRED

    # ------------------------------------------------------------------ what happens

    def begin(self) -> None:
        """The ring is held: speak for the run, or tell who does that we are there."""
        if self._before is None:
            self._speak()
        else:
            self._presence.announce(self._before)

    def look_around(self, *, whole: bool, drained: bool) -> None:
        """Is the trainer still there, and the shadow before?"""
        if self.trainer_lives and self.trainer.gone:
            self.trainer_left()
        before = self._before
        if before is None:
            return
        if is_alive(before) and not whole:
            # what is in the ring may still complete us; if not, leave the run to it
            if drained and not self.trainer_lives:
                self.happens(RoleEvent.ENDS, "the shadow before holds more")
            return
        self._speak()  # first: whoever looks now must find one of us
        if self._presence.retire(before):
            self._before = None

    def _speak(self) -> None:
        if self.role is Role.FOLLOWING:
            self._presence.speak()
            self.happens(RoleEvent.SPEAKS)
            if not self.trainer_lives:
                self.happens(RoleEvent.TRAINER_GONE)

    def trainer_left(self) -> None:
        """It ended, or left the run. Last words are next."""
        if not self.trainer_lives:
            return
        self._gone_at = time.monotonic()
        self.happens(RoleEvent.TRAINER_GONE)
        self._presence.trainer_gone()

    def announced(self, heir: AskDefer) -> None:
        self._heir = heir

    def leave_when_idle(self, patience_seconds: float, *, owes: bool, hopeless: bool) -> None:
        """Nobody needs it any more. `owes`: something is not in the store, or not in the bucket. `hopeless`:
        it never will be."""
        assert self._gone_at is not None
        idle = time.monotonic() - self._gone_at
        patience_seconds *= _GIVE_UP_IDLES if owes else 1
        if hopeless or idle > patience_seconds:
            self.happens(RoleEvent.ENDS, f"idle seconds={idle:.0f}")
