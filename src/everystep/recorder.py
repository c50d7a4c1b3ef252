"""Keeps a trainer recording: connects tap and shadow, replaces either when it fails or is outgrown.

Owned by the training thread. Nothing here may stop training: a failure becomes a problem in the status,
and a new shadow is started beside training.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from everystep.capture.census import LiveCensus, Models, Optimizers, take_census
from everystep.capture.groups import encode_groups
from everystep.capture.state import UserState
from everystep.capture.suspicion import Suspicions
from everystep.capture.tap import Tap
from everystep.capture.turn import Moment, OpenTurn
from everystep.capture.versions import Versions
from everystep.connection import Connection, connect, waiting_rule
from everystep.core.cadence import Rest, retry_seconds
from everystep.core.census import Script
from everystep.core.pace import replay_threads
from everystep.core.phases import Phase
from everystep.errors import CaptureError, CaptureTooLarge, EverystepError, RunBusy, ShadowLost
from everystep.figures import NO_FIGURES, figures
from everystep.forks import ForkedRecorder, disarm_in_forks
from everystep.format.base import Point
from everystep.health import Health
from everystep.lane.control import (
    Answer,
    AskLeave,
    AskRetire,
    AskStatus,
    Request,
)
from everystep.lane.runtime import ShadowCard, read_card
from everystep.options import Options
from everystep.recover.find import RestorePoint
from everystep.shadow.spawn import ShadowHandle
from everystep.standing import Standing
from everystep.starter import Started, Starter

log = logging.getLogger("everystep")

_DOCUMENT_SLACK_BYTES = 16 << 10
_LANES_MAX = 8


class Recorder:
    def __init__(
        self,
        path: Path,
        folder: Path,
        options: Options,
        models: Models,
        optimizers: Optimizers,
        user_state: UserState,
    ) -> None:
        self.path, self.step = path, 0
        self.standing = Standing(path)
        self.versions: list[int] = []
        self.turn = OpenTurn()
        self._suspicions = Suspicions()
        self.live: LiveCensus | None = None
        self.tap: Tap | None = None
        self.connection: Connection | None = None
        self.problem = ""
        self.health = Health(path, options.overhead_budget_percent)
        self.folder = folder
        self.holder: object = None  # the Run that a user holds, or has forgotten
        self._options = options
        self._models, self._optimizers = models, optimizers
        self._user_state = user_state
        self._document_bytes = len(user_state.collect()) + _DOCUMENT_SLACK_BYTES
        self._script: Script | None = None
        self._rest = Rest(options.every)
        self._failures = 0
        self._retry_at = 0.0
        self.starter = Starter(self._connection_beside)
        self._past = NO_FIGURES
        self._forked: ForkedRecorder | None = None
        disarm_in_forks(self)

    # ------------------------------------------------------------------ connecting

    def census(self) -> LiveCensus:
        live = take_census(self._models, self._optimizers, log=self._options.log)
        if self._script is None:  # at attach, before anything is loaded
            self._script = Script(encode_groups(live.keyed), self._options.override)
            self.turn.count(live.optimizers)
        live.census = msgspec.structs.replace(live.census, script=self._script)
        self.live = live
        return live

    def connect(
        self,
        live: LiveCensus,
        *,
        found: RestorePoint | None = None,
        predecessor: ShadowCard | None = None,
        opening_rng: bytes | None = None,
    ) -> None:
        """Start a shadow and record into it what is live now, which counts as sealed. Without a replica to
        hand on, the base is sent. `opening_rng`: random states that are not restored yet."""
        self.turn.begin(Moment.now(self._user_state, live, opening_rng))
        self._connect(live, found, predecessor)

    def _connect(
        self, live: LiveCensus, found: RestorePoint | None, predecessor: ShadowCard | None
    ) -> None:
        self._use(self._new_connection(live, found, predecessor), live)
        self.problem, self._failures = "", 0
        assert self.tap is not None
        if found is None:
            self.tap.record.states.queue_base(fresh=True)
            self.tap.record.send_base()

    def _new_connection(
        self, live: LiveCensus, found: RestorePoint | None, predecessor: ShadowCard | None
    ) -> Connection:
        return connect(
            self.path,
            self.folder,
            live.census,
            live.powers,
            self._options,
            replay_threads=replay_threads(len(os.sched_getaffinity(0))),
            document_bytes=self._document_bytes,
            unmoved_bytes=live.unmoved_bytes,
            place=self.standing.at(self.step, predecessor),
            found=found,
            predecessor=predecessor,
        )

    def _use(self, connection: Connection, live: LiveCensus) -> None:
        self.connection = connection
        self.tap = Tap(
            live,
            connection.ring,
            self._user_state,
            step=self.step,
            turn=self.turn,
            suspicions=self._suspicions,
            versions=Versions(self.versions),
            guard=self.guarded,
            may_wait=waiting_rule(connection, self._options.on_lag, self.path, lambda: self.step),
            rest=self._rest,
            budget_percent=self._options.overhead_budget_percent,
            fingerprint_every=self._options.fingerprint_every,
        )
        self.tap.hooks.install()

    def card(self) -> ShadowCard | None:
        """The card of our own shadow, once it speaks for the run."""
        card = read_card(self.folder)
        ours = self.connection.shadow.pid if self.connection else 0
        return card if card is not None and card.pid == ours else None

    # ------------------------------------------------------------------ every step

    def open(self) -> None:
        """The state before the first step counts too, as it is when the loop begins: what was drawn before
        it is drawn again by who resumes."""
        if self.tap is not None and not self.tap.opened:
            self._seal_now()

    def open_as_loaded(self) -> None:
        """The same, with the random states that were found."""
        if self.tap is not None:
            self.guarded(self.tap.open)()

    def seal(self) -> None:
        idle_before, rested = self._device_is_idle, self._rests
        self._seal_next()
        self._look_after()
        tap = self.tap
        if tap is None or not (tap.phase is Phase.RECORDING or (rested and self._rests)):
            self.health.skip()
        else:
            device = self._past["device_stall_seconds"] + tap.record.copier.stall_seconds
            # a device that runs out of work waits for the host; one that did so meanwhile, for half of it
            share = (idle_before + 1) / 2 if self._device_is_idle else 0.0
            self.health.sealed(self.step, share=share, device=device)
        self.tell_trouble()

    @property
    def _rests(self) -> bool:
        """Between two bases of a run without a log, where most steps are."""
        return self.tap is not None and self.tap.phase is Phase.RESTING

    @property
    def _device_is_idle(self) -> bool:
        return self.tap is None or self.tap.record.copier.device_is_idle

    def _seal_now(self) -> None:
        self.turn.begin(self.guarded(Moment.now)(self._user_state, self.live))
        if self.tap is not None:
            self.guarded(self.tap.seal)(self.step, self.turn.sealed)

    def _seal_next(self) -> None:
        self.step += 1
        try:
            self._seal_now()
        except (
            BaseException
        ):  # Ctrl-C, or the user's state_dict(): nobody waits for a step that is not there
            if self.tap is None or not self.tap.has_sealed(self.step):
                self.step -= 1
                self.turn.lose()
            raise

    def _look_after(self) -> None:
        for _ in range(_LANES_MAX):
            if self.tap is not None and self.tap.phase is Phase.OUTGROWN:
                self.guarded(self.change)()
        self.guarded(self.look_after_shadow)()
        if self.live is not None and (self.tap is None or self.tap.phase.pauses):
            self.guarded(self.turn.look)(self.live)

    def tell_trouble(self) -> None:
        """Steps that are not recorded, or not written, are nothing to find out after a crash."""
        if self.tap is None:
            trouble = f"steps are not recorded: {self.problem}" if self.problem else ""
        elif self.tap.is_dropping:
            trouble = f"steps are not recorded: {self.tap.mode[1]}"
        else:
            trouble = self.connection.ring.notice if self.connection else ""
        self.health.tell(self.step, trouble)

    def guarded(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer's boundary: a failure of ours degrades loudly, unless the user wants it raised."""

        @functools.wraps(work)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._forked is not None:
                return self._forked.tell()
            began = time.perf_counter()
            try:
                with self.or_replace():
                    return work(*args, **kwargs)
            except Exception as error:
                if self._options.on_failure == "raise":
                    raise
                self._lose(f"{type(error).__name__}: {error}")
            finally:
                self.health.spent(time.perf_counter() - began)
            return None

        return guarded

    def disarm(self) -> None:
        """In a process that was forked from the trainer: ring, shadow and run are the parent's."""
        self._forked, self._retry_at = ForkedRecorder(self.path), math.inf
        self.tap = self.connection = None
        self.problem = self._forked.problem

    @contextlib.contextmanager
    def or_replace(self) -> Iterator[None]:
        """A record that is too large for its slot is not sent: a larger ring is needed. What else cannot be
        recorded costs the shadow: a new one begins with a base."""
        try:
            yield
        except CaptureTooLarge as error:
            log.info("ring_outgrown run=%s %s", self.path, error)
            self._document_bytes = max(
                2 * self._document_bytes, error.need_bytes + _DOCUMENT_SLACK_BYTES
            )
            if self.tap is not None:
                self.tap.outgrow()
        except CaptureError as error:
            if self._options.on_failure == "raise":
                raise
            self._lose(f"{type(error).__name__}: {error}")

    def change(self) -> None:
        """The census or a slot's size is no longer right: a new shadow, the old one until it is based."""
        predecessor = self.card()
        if self.connection is not None and self.connection.shadow.alive:
            term = self.ask(AskStatus(exact=True), 30).status.get("term")
            if term:
                self.standing.point = Point(term, self.step)
            if predecessor is None:  # unless it takes over now, the one before it still speaks
                refused = self.ask(AskRetire(unless_speaking=True), 30).error
                predecessor = self.card() if refused else self.connection.predecessor
        self.drop()
        live = self.census()
        self.versions = [self.step] * len(live.tensors)
        self._connect(live, None, predecessor)
        self.open_as_loaded()

    def look_after_shadow(self) -> None:
        """Is it alive, is a new one ready?"""
        if self.is_halted:
            return  # halted
        if self.connection is not None:
            if not self.connection.shadow.alive:
                last_words = self.connection.ring.notice
                why = f": {last_words}" if last_words else ""
                self._lose(f"shadow {self.connection.shadow.pid} is gone{why}")
                self._retry_at = 0.0
        elif self.starter.done and self.turn.sealed is not None:
            self._welcome(self.starter.take())
        elif not self.starter.busy and time.monotonic() >= self._retry_at:
            self.starter.begin(self.census())

    def _connection_beside(self, live: LiveCensus) -> Connection:
        """In the starter's thread."""
        self.standing.follow(self.step)
        # a shadow that still speaks for the run goes when the new one holds the state
        return self._new_connection(live, None, read_card(self.folder))

    def _welcome(self, started: Started) -> None:
        """A new shadow is there: record into it from this step on, unless training has outgrown it."""
        live = self.census()
        if live.census != started.census:
            started.send_away()
            self.starter.begin(live)
            return
        self.versions = [self.step] * len(live.tensors)
        self._use(started.connection, live)
        assert self.tap is not None
        self.tap.record.states.queue_base(fresh=True)
        self.open_as_loaded()
        if self.tap is not None:  # unless the first seal failed again
            pid = started.connection.shadow.pid
            log.warning("reconnected run=%s step=%d shadow=%d", self.path, self.step, pid)
            self.problem, self._failures = "", 0

    def _lose(self, reason: str) -> None:
        """Stop recording; a new shadow is started after a while."""
        self.problem = reason
        self._failures += 1
        self._retry_at = time.monotonic() + retry_seconds(self._failures - 1)
        if self.connection is not None and self.connection.predecessor is not None:
            with contextlib.suppress(EverystepError):  # before it took over nobody needs it
                self.connection.shadow.ask(AskRetire(unless_speaking=True), timeout_seconds=2)
        self._keep_last_seal()
        self.drop()

    def _keep_last_seal(self) -> None:
        """The next shadow may be given the step that this one held, if training is still there."""
        with contextlib.suppress(Exception):  # what failed just now may fail again
            tap = self.tap if self.turn.has_moved_on() is None else None
            if tap is not None and self.live is not None and not tap.seals.has_moved_on():
                self.turn.look(self.live)

    def drop(self) -> None:
        """Take the hooks away and let go of ring and shadow."""
        self._past = self.figures()
        if self.tap is not None:
            self.tap.remove()
            self.tap = None
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.problem:
            self.tell_trouble()

    def leave(self) -> None:
        """Training goes to another point: a shadow that is just being started would claim the run for this
        one. It has recorded nothing yet."""
        self.drop()
        self.starter.abandon()

    def figures(self) -> Mapping[str, Any]:
        """What recording has cost and repaired since attach."""
        return self._past if self.tap is None else figures(self._past, self.tap)

    @property
    def mode(self) -> tuple[str, str]:
        """What happens to this run's steps just now, and why."""
        if self.tap is None:
            return "not recording", self.problem or "a shadow is being started"
        return self.tap.mode

    @property
    def is_halted(self) -> bool:
        return self._retry_at == math.inf

    def halt(self, other: str) -> None:
        """Another trainer has the run: two must not write it, so that this one records nothing more."""
        if self.is_halted:
            return
        reason = (
            f"run {self.path}: recording has stopped at step {self.step}: another trainer holds the run "
            f"now ({other}); the lock file was removed or replaced"
        )
        with contextlib.suppress(EverystepError):
            self.ask(AskLeave(), 5)
        self.drop()
        self.problem, self._retry_at = reason, math.inf
        log.error("halted run=%s step=%d reason=%s", self.path, self.step, reason)
        if self._options.on_failure == "raise":
            raise RunBusy(reason, hint="stop one of the two trainers")
        warnings.warn(f"everystep: {reason}; stop one of the two trainers", stacklevel=5)

    # ------------------------------------------------------------------ asking and ending

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Answer:
        return self.shadow.ask(request, timeout_seconds=timeout_seconds, meanwhile=meanwhile)

    @property
    def shadow(self) -> ShadowHandle:
        if self.connection is None:
            raise ShadowLost(f"run {self.path}: no shadow at the moment ({self.problem})")
        return self.connection.shadow

    def abandon(self) -> None:
        """Let go of everything, a shadow that is just starting included."""
        self.drop()
        self.turn.end()
        self.starter.abandon()
