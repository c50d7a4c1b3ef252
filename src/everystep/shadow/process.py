"""The shadow's main loop: the one place in this process that wires long-lived objects together."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from typing import Any

from everystep.core.events import Event, Seal
from everystep.core.roles import Role, RoleEvent
from everystep.format.base import SessionValues
from everystep.lane.arena import SharedMemory
from everystep.lane.ring import RingReader
from everystep.option_values import duration_seconds
from everystep.process.config import ShadowConfig
from everystep.shadow.advances import Advances
from everystep.shadow.faults import Faults
from everystep.shadow.handover import Handover
from everystep.shadow.intake import Intake
from everystep.shadow.persistence import Persistence
from everystep.shadow.presence import Presence
from everystep.shadow.receiving import Receiver
from everystep.shadow.replica import Replica
from everystep.shadow.report import describe_intake, describe_process
from everystep.shadow.requests import Requests
from everystep.shadow.succession import Succession
from everystep.shadow.threads import guarded
from everystep.shadow.warmup import Warmup

log = logging.getLogger(__name__)

_POLL_MS_MIN, _POLL_MS_MAX = 2, 50
_CLAIM_SECONDS = 20.0
_LAST_SECONDS = 5.0
_HEALED_SECONDS = 60.0  # without another failure; what fails again and again is whole in between
_FAILING_SECONDS = 60.0  # at every turn: then the trainer's next shadow may do better


class Shadow:
    def __init__(self, config: ShadowConfig) -> None:
        self.config = config
        replica = Replica(config.census, config.options.tuning.arena_dir)
        ring = RingReader(SharedMemory(config.ring_fd), config.geometry)
        empty = SessionValues(config.step, b"", b"", (), ())
        self.intake = Intake(config.census, ring, replica, empty)
        self.intake.on_record = self._on_record
        self.advances = Advances(config, replica, self.intake)
        self.warmup = Warmup(ring)
        handover = Handover(config, replica, self.intake)
        self.faults = Faults()
        self.persistence = Persistence(config, self.intake)
        writer, scheduler = self.persistence.base_writer, self.persistence.base_scheduler
        self.presence = Presence(config, writer, self.persistence.directory_watch)
        self.succession = Succession(config, self.presence, self.faults)
        self.receiver = Receiver(self.intake, scheduler, writer, self.succession, self.faults)
        self.requests = Requests(
            self.presence.card,
            self.status,
            handover,
            self.receiver,
            self.persistence,
            self.succession,
        )
        self._noticed = ""  # what the trainer was told last
        self._busy = False
        self._poll_ms = _POLL_MS_MIN

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until there is nobody left to serve."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._begin()
        try:
            while self.succession.role is not Role.LEAVING:
                self._tick()
                guarded(self._wait, self._cannot_wait)
        finally:
            self._leave()

    def _begin(self) -> None:
        """Claim the run, and tell the trainer that its ring is held, or that the run is somebody else's: then
        who attaches looks at it again."""
        self.advances.load_torch()
        writer = self.persistence.base_writer
        if self.succession.alone:
            writer.begin_claim()
            writer.wait(_CLAIM_SECONDS)  # not for ever: a disk may hang
        fenced = writer.trouble.fenced
        if fenced:
            self.succession.happens(RoleEvent.ENDS, "the run is another's")
        else:
            self.requests.board.post(self.status())
            self.succession.begin()
        told = writer.trouble.problem if fenced else str(os.getpid())
        os.write(self.config.ready_fd, told.encode())
        os.close(self.config.ready_fd)
        self.advances.use_twins()
        self.persistence.directory_watch.keep_watch()

    def _tick(self) -> None:
        """Each part is done whatever becomes of the others."""
        self._busy = False
        parts = self._look_around, self._receive, self.requests.look_after, self._keep_cadence
        for part in (*parts, self._go_away_when_idle, self._tell):
            guarded(part, self.faults.failed)
        self.faults.end_of_turn(_HEALED_SECONDS, whole=self.intake.whole)
        succession = self.succession
        if succession.trainer_lives or succession.terminated or not succession.alone:
            seconds = _LAST_SECONDS if succession.terminated else _FAILING_SECONDS
            if self.faults.last(seconds):
                succession.happens(RoleEvent.ENDS, "every turn fails")

    def _look_around(self) -> None:
        succession, requests = self.succession, self.requests
        succession.look_around(whole=self.intake.whole, drained=self.receiver.drained)
        sockets = requests.control, requests.descriptors
        self.presence.look_after(*sockets, speaks=succession.speaks)
        self.advances.use_torch_if_loaded()
        if succession.owns_memory and self.advances.complete:
            self.warmup.look_after(has_base=self.persistence.base_scheduler.has_begun)

    def _receive(self) -> None:
        self._busy = self.receiver.receive(waited_for=self.requests.waiting)

    def _on_record(self, seal: Seal, entries: list[tuple[list[Event], memoryview]]) -> None:
        try:
            self.persistence.on_record(seal, entries)
        except Exception as error:
            if self.succession.trainer_lives:
                raise  # it sends everything again
            self.faults.failed(error)  # of the log, which notices the gap: the replica is sound

    def _keep_cadence(self) -> None:
        succession, persistence, scheduler = (
            self.succession,
            self.persistence,
            self.persistence.base_scheduler,
        )
        alone, trainer_lives = succession.alone, succession.trainer_lives
        if alone:
            leaving = succession.terminated or not trainer_lives
            persistence.look_after_log_and_bucket(leaving=leaving)
        persistence.tuning.look_after()
        if self.receiver.distrusted:
            return  # nothing that could be written
        drained = self.receiver.drained
        if not trainer_lives and drained and alone:
            self.intake.drop_unsealed()
        if succession.terminated and drained:
            if alone:
                scheduler.write_now()
            succession.happens(RoleEvent.ENDS, "terminated")
        elif alone:
            scheduler.persist_if_due(
                asked=self.requests.wants_base(self.intake.step),
                last_words=not trainer_lives and drained,
                moving=trainer_lives,
                log_broken=persistence.log is not None and persistence.log.broken,
            )

    def _go_away_when_idle(self) -> None:
        receiver, persistence, succession = self.receiver, self.persistence, self.succession
        if succession.trainer_lives or receiver.distrusted or not receiver.drained:
            return
        if persistence.base_writer.busy:
            return
        # it may write nothing more, and others have gone on; or it has nothing that could be written
        fenced = persistence.base_writer.trouble.fenced
        hopeless = fenced or (not self.intake.replica.complete and succession.alone)
        patience = duration_seconds("tuning.idle_exit", self.config.options.tuning.idle_exit)
        succession.leave_when_idle(patience, owes=persistence.owes, hopeless=hopeless)

    def _tell(self) -> None:
        """The trainer tells its user what is wrong here."""
        trouble = self._trouble
        if trouble != self._noticed:
            self.intake.ring.put_notice(trouble)
            self._noticed = trouble
        self.requests.board.post(self.status())

    def _wait(self) -> None:
        self._poll_ms = _POLL_MS_MIN if self._busy else min(2 * self._poll_ms, _POLL_MS_MAX)
        poller = select.poll()
        for fd in (self.requests.control.fileno(), self.requests.descriptors.socket.fileno()):
            poller.register(fd, select.POLLIN)
        trainer = self.succession.trainer
        if self.succession.trainer_lives and trainer.fd >= 0:
            poller.register(trainer.fd, select.POLLIN)
        with contextlib.suppress(InterruptedError):
            poller.poll(0 if self._busy else self._poll_ms)

    def _cannot_wait(self, error: Exception) -> None:
        self.faults.failed(error)
        time.sleep(_POLL_MS_MAX / 1000)

    # ------------------------------------------------------------------ what is told

    def status(self) -> dict[str, Any]:
        succession, requests = self.succession, self.requests
        return {
            **describe_process(
                self.config.survival,
                succession.trainer.refused,
                requests.control,
                requests.board,
                requests.descriptors,
            ),
            "trainer_pid": self.config.trainer_pid if succession.trainer_lives else None,
            "warm": self.warmup.done,
            **describe_intake(self.intake),
            **self.presence.without_lost_claims(self.persistence.describe()),
            "health": "degraded" if self._trouble else "ok",
            "problem": self._trouble,
        }

    @property
    def _trouble(self) -> str:
        persistence = self.persistence
        logged = persistence.log.problem if persistence.log else ""
        delayed = persistence.base_scheduler.delayed
        stored = self.presence.problem or persistence.base_writer.trouble.problem or delayed
        return stored or self.faults.problem or logged or persistence.shipper.problem

    # ------------------------------------------------------------------ the end

    def _on_sigterm(self, *_: object) -> None:
        self.succession.terminated = True

    def _leave(self) -> None:
        succession = self.succession
        retired = succession.is_retired
        self.persistence.finish(retired=retired, ended_well=succession.ended_well)
        if not retired:
            self.presence.leave()
            self.persistence.ship_the_rest()
        self.requests.close()
        self.presence.remove_sockets()
