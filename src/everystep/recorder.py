"""Keeps a trainer recording: connects tap and shadow, replaces either when it fails or is outgrown.

Owned by the training thread. Nothing here may stop training: a failure becomes a problem in the status,
and a new shadow is started beside training.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everystep.boundary import Boundary
from everystep.capture.subject import Subject
from everystep.capture.tap import Tap
from everystep.capture.versions import Versions
from everystep.connection import Connection, waiting_rule
from everystep.core.cadence import RestBetweenBases
from everystep.core.phases import Phase
from everystep.errors import RunBusy
from everystep.figures import NO_FIGURES, figures
from everystep.forks import disarm_in_forks
from everystep.health import Health
from everystep.lane.runtime import ShadowCard
from everystep.link import Link
from everystep.options import Options
from everystep.recover.point import RestorePoint
from everystep.standing import Start
from everystep.starter import Started

log = logging.getLogger("everystep")

_RINGS_MAX = 8  # made for one seal


class Recorder:
    """`holder` is the user's `Run`: hooks keep both alive, so that a later attach can end them."""

    def __init__(
        self, path: Path, folder: Path, options: Options, subject: Subject, holder: object
    ) -> None:
        self.path = path
        self.step = 0
        self.subject = subject
        self.tap: Tap | None = None
        self.link = Link(path, folder, options, len(subject.user_state.collect()))
        self.health = Health(path, options.overhead_budget_percent)
        self.boundary = Boundary(path, self, self.health, raises=options.on_failure == "raise")
        self._holder = holder
        self._options = options
        self._rest = RestBetweenBases(options.every)
        self._past = NO_FIGURES
        disarm_in_forks(self)

    def connect(
        self,
        start: Start,
        *,
        found: RestorePoint | None = None,
        predecessor: ShadowCard | None = None,
        opening_rng: bytes | None = None,
    ) -> None:
        """Start a shadow and record into it what is live now, which counts as sealed. Without a replica to
        hand on, the base is sent. `opening_rng`: random states that are not restored yet."""
        self.step, self.link.starter.standing.point = start.step, start.point
        sealed = self.subject.sealed_values(opening_rng)
        self.subject.turn.begin(sealed)
        self.link.starter.make_room(len(sealed.state))  # what was loaded may be more than at first
        self._connect(start.versions, predecessor, found)

    def _connect(
        self, versions: Sequence[int], predecessor: ShadowCard | None, found: RestorePoint | None
    ) -> None:
        connection = self.link.starter.start(self.subject.live, self.step, predecessor, found)
        tap = self._use(connection, versions)
        self.link.outage.end()
        if found is None:
            tap.record.bases.add(fresh=True)
            tap.record.send_base()

    def _use(self, connection: Connection, versions: Sequence[int]) -> Tap:
        self.link.connection = connection
        self.tap = Tap(
            self.subject,
            connection.ring,
            step=self.step,
            versions=Versions(versions),
            guard=self.boundary.guard,
            may_wait=waiting_rule(connection, self._options.on_lag, self.path, lambda: self.step),
            rest=self._rest,
            budget_percent=self._options.overhead_budget_percent,
            fingerprint_every=self._options.tuning.fingerprint_every,
        )
        self.tap.hooks.install()
        return self.tap

    # ------------------------------------------------------------------ every step

    @property
    def is_opened(self) -> bool:
        """Whether there is a seal that training can be taken back to."""
        return self.tap is None or self.tap.opened

    def open(self) -> None:
        """The state before the first step counts too, as it is when the loop begins: what was drawn before
        it is drawn again by who resumes."""
        if not self.is_opened:
            self._seal_now()
            self._change_if_outgrown()

    def open_as_loaded(self) -> None:
        """The same, with the random states that were found."""
        if self.tap is not None:
            self.boundary.guard(self.tap.open)()

    def nothing_happened(self) -> bool:
        """Whether a seal now would say exactly what the last one said."""
        tap = self.tap
        return tap is not None and tap.opened and tap.phase.records and tap.seals.nothing_happened()

    def seal(self) -> None:
        was_idle, rested = self._is_idle, self._rests
        self._seal_next()
        self._look_after()
        tap = self.tap
        if tap is None or not (tap.phase is Phase.RECORDING or (rested and self._rests)):
            self.health.skip()
        else:
            device = self._past["device_stall_seconds"] + tap.record.copier.stall_seconds
            self.health.sealed(self.step, was_idle=was_idle, is_idle=self._is_idle, device=device)
        self.tell_trouble()

    @property
    def _rests(self) -> bool:
        """Between two bases of a run without a log, where most steps are."""
        return self.tap is not None and self.tap.phase is Phase.RESTING

    @property
    def _is_idle(self) -> bool:
        return self.tap is None or self.tap.record.copier.device_is_idle

    def _seal_now(self) -> None:
        turn = self.subject.turn
        turn.begin(self.boundary.guard(self.subject.sealed_values)())
        if self.tap is not None:
            self.boundary.guard(self.tap.seal)(self.step, turn.sealed)

    def _seal_next(self) -> None:
        self.step += 1
        try:
            self._seal_now()
        except BaseException:  # Ctrl-C, or the user's state_dict()
            self._lose_seal()
            raise

    def _lose_seal(self) -> None:
        """It was interrupted: nobody waits for a step that is not there."""
        if self.tap is None or not self.tap.has_sealed(self.step):
            self.step -= 1
            self.subject.turn.lose()

    def _change_if_outgrown(self) -> None:
        for _ in range(_RINGS_MAX):
            if self.tap is not None and self.tap.phase is Phase.OUTGROWN:
                self.boundary.guard(self.change)()

    def _look_after(self) -> None:
        self._change_if_outgrown()
        self.boundary.guard(self.look_after_shadow)()
        if self.tap is None or self.tap.phase.pauses:
            self.boundary.guard(self.subject.look)()

    def tell_trouble(self) -> None:
        """Steps that are not recorded, or not written, are nothing to find out after a crash."""
        if self.tap is None:
            problem = self.link.problem
            trouble = f"steps are not recorded: {problem}" if problem else ""
        elif self.tap.is_dropping:
            trouble = f"steps are not recorded: {self.tap.mode[1]}"
        else:
            trouble = self.link.notice()
        self.health.tell(self.step, trouble)

    def outgrow(self, need_bytes: int) -> None:
        self.link.starter.enlarge(need_bytes)
        if self.tap is not None:
            self.tap.outgrow()

    def lose(self, reason: str, *, at_once: bool = False) -> None:
        """Stop recording; a new shadow is started, `at_once` or after a while."""
        self.link.outage.begin(reason, time.monotonic(), at_once=at_once)
        self.link.retire_unspoken()
        self._keep_last_seal()
        self.drop()

    def _keep_last_seal(self) -> None:
        """The next shadow may be given the step that this one held, if training is still there."""
        with contextlib.suppress(Exception):  # what failed just now may fail again
            tap = self.tap if self.subject.turn.has_moved_on() is None else None
            if tap is not None and not tap.seals.has_moved_on():
                self.subject.look()

    def disarm(self) -> None:
        """In a process that was forked from the trainer: ring, shadow and run are the parent's."""
        self.tap = self.link.connection = None
        self.link.outage.last(self.boundary.disarm())

    def change(self) -> None:
        """The census or a slot's size is no longer right: a new shadow, the old one until it is based."""
        predecessor = self.link.predecessor(self.step)
        self.drop()
        live = self.subject.census()
        self._connect([self.step] * len(live.tensors), predecessor, None)
        self.open_as_loaded()

    def look_after_shadow(self) -> None:
        """Is it alive, is a new one ready?"""
        link = self.link
        if link.outage.is_final:
            return
        if link.connection is not None:
            if not link.connection.shadow.alive:
                why = f": {link.notice()}" if link.notice() else ""
                self.lose(f"shadow {link.connection.shadow.pid} is gone{why}", at_once=True)
        elif link.starter.done and self.subject.turn.sealed is not None:
            self._welcome(link.starter.take())
        elif link.may_begin():
            self.start_beside()

    def start_beside(self) -> None:
        """Have a shadow started while training goes on."""
        self.link.starter.begin(self.subject.census(), self.step)

    def _welcome(self, started: Started) -> None:
        """A new shadow is there: record into it from this step on, unless training has outgrown it."""
        live = self.subject.census()
        if live.census != started.census:
            started.send_away()
            self.start_beside()
            return
        tap = self._use(started.connection, [self.step] * len(live.tensors))
        tap.record.bases.add(fresh=True)
        self.open_as_loaded()
        if self.tap is not None:  # unless the first seal failed again
            pid = started.connection.shadow.pid
            log.warning("reconnected run=%s step=%d shadow=%d", self.path, self.step, pid)
            self.link.outage.end()

    @property
    def mode(self) -> tuple[str, str]:
        """What happens to this run's steps just now, and why."""
        if self.tap is None:
            return "not recording", self.link.problem or "a shadow is being started"
        return self.tap.mode

    def figures(self) -> Mapping[str, Any]:
        """What recording has cost and repaired since attach."""
        return self._past if self.tap is None else figures(self._past, self.tap)

    def drop(self) -> None:
        """Take the hooks away, and give up ring and shadow."""
        self._past = self.figures()
        if self.tap is not None:
            self.tap.remove()
            self.tap = None
        self.link.close()
        if self.link.problem:
            self.tell_trouble()

    def leave(self) -> None:
        """Training goes to another point: a shadow that is just being started would claim the run for this
        one. It has recorded nothing yet."""
        self.drop()
        self.link.starter.abandon()

    def fail(self) -> None:
        """Training ends in a step that does not count: the shadow keeps the one before."""
        if self.tap is not None:
            self.tap.remove()  # copies under way land before the shadow is told
        self.link.dismiss()

    def abandon(self) -> None:
        """Give up everything, a shadow that is just starting included."""
        self.drop()
        self.subject.turn.end()
        self.link.starter.abandon()

    def halt(self, other: str) -> None:
        """Another trainer has the run: two must not write it, so that this one records nothing more."""
        if self.link.outage.is_final:
            return
        reason = (
            f"run {self.path}: recording has stopped at step {self.step}: another trainer holds the run "
            f"now ({other}); the lock file was removed or replaced"
        )
        self.link.dismiss()
        self.drop()
        self.link.outage.last(reason)
        log.error("halted run=%s step=%d reason=%s", self.path, self.step, reason)
        if self._options.on_failure == "raise":
            raise RunBusy(reason, hint="stop one of the two trainers")
        warnings.warn(f"everystep: {reason}; stop one of the two trainers", stacklevel=5)
