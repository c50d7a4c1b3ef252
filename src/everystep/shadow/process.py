"""The shadow's main loop: the one place in this process that wires long-lived objects together."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

from everystep.core.events import Event, Seal
from everystep.format.base import SessionValues
from everystep.lane import control
from everystep.lane.arena import SharedMemory
from everystep.lane.descriptors import DescriptorServer
from everystep.lane.host import process_start
from everystep.lane.process_watch import ProcessWatch
from everystep.lane.ring import RingReader
from everystep.lane.runtime import is_alive
from everystep.option_values import duration_seconds
from everystep.shadow.advances import Advances
from everystep.shadow.base_scheduler import BaseScheduler
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.beside import guarded
from everystep.shadow.config import ShadowConfig
from everystep.shadow.faults import START_OVER_MAX, Faults
from everystep.shadow.handover import Handover
from everystep.shadow.intake import Intake
from everystep.shadow.logkeeper import LogKeeper
from everystep.shadow.lookout import Lookout, Seen
from everystep.shadow.outlook import Outlook
from everystep.shadow.presence import Presence
from everystep.shadow.replica import Replica
from everystep.shadow.report import describe_intake, describe_process, describe_store
from everystep.shadow.requests import Waiter
from everystep.shadow.shipper import Shipper
from everystep.shadow.tuning import Tuning, first_batch, first_options
from everystep.shadow.warmup import Warmup
from everystep.store.disk.meter import Meter

log = logging.getLogger(__name__)

_BATCH_SECONDS = 0.05  # of taking records in between two looks at the control channel
_POLL_MS_MIN, _POLL_MS_MAX = 2, 50
_CLAIM_SECONDS = 20.0
_LAST_SECONDS = 5.0
_SHIP_LAST_SECONDS = 20.0
_HEALED_SECONDS = 60.0  # without another failure; what fails again and again is whole in between
_FAILING_SECONDS = 60.0  # at every turn: then the trainer's next shadow may do better
_GIVE_UP_IDLES = 10  # a store that fails for this many idle times is not waited for any longer


class Shadow:
    def __init__(self, config: ShadowConfig) -> None:
        self.config = config
        self.options = first_options(config)
        self.replica = Replica(config.census, config.arena_dir)
        ring = RingReader(SharedMemory(config.ring_fd), config.geometry)
        empty = SessionValues(config.step, b"", b"", (), ())
        self.intake = Intake(config.census, ring, self.replica, empty)
        self.warmup = Warmup(ring)
        self.advances = Advances(config, self.replica, self.intake)
        self.handover = Handover(config, self.replica, self.intake)
        meter = Meter(config.limits)
        run, store = Path(config.run), (config.continues, config.rules, config.run_id)
        self.base_writer = BaseWriter(run, *store, meter, config.known)
        self.lookout = Lookout(self._look)
        self.base_writer.on_failure = self.lookout.look
        self.presence = Presence(config, self.base_writer, self.lookout)
        card = self.presence.card
        self.base_writer.outlook = self._outlook = Outlook(run, config.census, self.options)
        self.base_scheduler = BaseScheduler(self.options, self.intake, self.base_writer)
        self.log = (
            LogKeeper(run, config.census, first_batch(config), meter)
            if config.durable_log
            else None
        )
        if self.log is not None:
            self.base_writer.ended_log = self.log.ended
        self.tuning = Tuning(config, self.intake, self.base_writer, self.base_scheduler, self.log)
        self.intake.on_record = self._on_record
        shipping = config.bucket, config.bucket_bytes_per_second, config.log_is_resumed
        self.shipper = Shipper(run, *shipping)
        self.shipper.check_directory = self.base_writer.check_directory
        self.control = control.ControlServer(card.control)
        self.board = control.NoticeBoard(card.control)
        self.descriptors = DescriptorServer(Path(card.descriptors))
        self._waiters: list[Waiter] = []
        self._trainer = ProcessWatch(config.trainer_pid, config.trainer_start)
        self._trainer_alive = True
        self._alone = config.predecessor is None  # no other shadow speaks for this run
        self._yielded = False
        self._terminated = False
        self._successor: control.AskDefer | None = None
        self._closed = False  # the trainer ended well
        self._retired = False  # a successor speaks for the run: the card is its business
        self._done = False
        self._idle_since = time.monotonic()
        self.faults = Faults()
        self._noticed = ""  # what the trainer was told last
        self._busy = False
        self._poll_ms = _POLL_MS_MIN
        self._distrusted = False  # something of ours failed: the replica is to be given up

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Until there is nobody left to serve."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.advances.load_torch()
        if self._alone:
            self.base_writer.begin_claim()
            self.base_writer.wait(_CLAIM_SECONDS)  # not for ever: a disk may hang
        fenced = self.base_writer.state.fenced
        if not fenced:
            self.board.put_up(self.status())
            self.presence.announce(self.config.predecessor)
        told = self.base_writer.state.problem if fenced else str(os.getpid())
        os.write(self.config.ready_fd, told.encode())
        os.close(self.config.ready_fd)
        self.advances.use_twins()
        self.lookout.keep_watch()
        self._done = fenced  # who attaches looks at the run again
        try:
            while not self._done:
                self._tick()
                guarded(self._wait, self._cannot_wait)
        finally:
            self._leave()

    def _tick(self) -> None:
        """Each part is done whatever becomes of the others."""
        self._busy = False
        parts = self._look_around, self._receive, self._answer_requests, self._keep_cadence
        for part in (*parts, self._go_away_when_idle, self._tell):
            guarded(part, self.faults.failed)
        self.faults.end_of_turn(_HEALED_SECONDS, whole=self.intake.whole)
        if self._trainer_alive or self._terminated or not self._alone:
            self._done |= self.faults.last(_LAST_SECONDS if self._terminated else _FAILING_SECONDS)

    def _tell(self) -> None:
        """The trainer tells its user what is wrong here."""
        trouble = self._trouble
        if trouble != self._noticed:
            self.intake.ring.put_notice(trouble)
            self._noticed = trouble
        self.board.put_up(self.status())

    def _wait(self) -> None:
        self._poll_ms = _POLL_MS_MIN if self._busy else min(2 * self._poll_ms, _POLL_MS_MAX)
        poller = select.poll()
        for fd in (self.control.fileno(), self.descriptors.socket.fileno()):
            poller.register(fd, select.POLLIN)
        if self._trainer_alive and self._trainer.fd >= 0:
            poller.register(self._trainer.fd, select.POLLIN)
        with contextlib.suppress(InterruptedError):
            poller.poll(0 if self._busy else self._poll_ms)

    def _cannot_wait(self, error: Exception) -> None:
        self.faults.failed(error)
        time.sleep(_POLL_MS_MAX / 1000)

    def _start_over(self, error: Exception) -> None:
        """A record could not be taken in, or half of it was redone."""
        if not self._trainer_alive and self.intake.whole and not self.intake.in_doubt:
            self.faults.failed(error)
            self.intake.stay()  # what cannot be read was the last that came
            return
        self.faults.replica_in_doubt(error)
        if self.faults.starts_over > START_OVER_MAX or not self._trainer_alive:
            self._done = True
            return
        self._distrusted = True

    # ------------------------------------------------------------------ who is there

    def _look_around(self) -> None:
        if self._trainer_alive and self._trainer.gone:
            self._trainer_gone()
        if not self._alone:
            self._look_for_predecessor()
        self.presence.look_after(self.control, self.descriptors)
        self.advances.use_torch_if_loaded()
        if self._ready_to_replay:
            self.warmup.look_after(has_base=self.base_scheduler.has_begun)

    def _look_for_predecessor(self) -> None:
        """Until it is gone, the memory we adopted and the run belong to the shadow before."""
        before = self.config.predecessor
        lives = before is not None and is_alive(before)
        if lives and not self.intake.whole:
            # what is in the ring may still complete us; if not, leave the run to it
            self._done |= not self._trainer_alive and self._drained
            return
        self._alone = self.presence.succeed(before)

    def _trainer_gone(self) -> None:
        """Last words: redo what was sealed, then make it durable."""
        log.info("trainer_gone pid=%d step=%d", self.config.trainer_pid, self.intake.step)
        self._trainer_alive = False
        self._idle_since = time.monotonic()
        self.presence.trainer_gone()

    @property
    def _ready_to_replay(self) -> bool:
        return self._alone_or_own_memory and self.advances.complete

    @property
    def _alone_or_own_memory(self) -> bool:
        """Adopted memory still belongs to the shadow before until that one is gone."""
        return self._alone or self.config.adopted is None

    # ------------------------------------------------------------------ records

    def _receive(self) -> None:
        if self._distrusted:
            if self.base_writer.reads_snapshot:
                return  # it may be reading what would be overwritten
            self.intake.forget()
            self.base_scheduler.wanted = None
            self._distrusted = False
        may_apply = self._alone_or_own_memory and not self._yielded
        patient = self._trainer_alive and not self._waiters and not self._terminated
        deadline = time.monotonic() + _BATCH_SECONDS
        while time.monotonic() < deadline:
            self.base_scheduler.look_after_copy()
            base = self.base_scheduler.wanted
            may_apply = may_apply and not self.base_scheduler.holds_still
            waits = patient and base is None and not self.intake.gap
            try:
                if not self.intake.take(may_apply=may_apply, patient=waits, base=base):
                    break
            except Exception as error:  # noqa: BLE001 — boundary: what was taken in is doubtful
                self._start_over(error)
                return
            self._busy = True
        self._look_after_gap()

    def _look_after_gap(self) -> None:
        sound = self.intake.whole and not self.intake.drifted
        if not self._trainer_alive and sound and self.intake.waits_for_base:
            self.intake.stay()  # nobody sends one
        elif (
            self.intake.gap
            and not self.intake.record_waits
            and self.base_scheduler.save_before_reset()
        ):
            self.intake.forget(keep=self.base_scheduler.has_news)

    def _on_record(self, seal: Seal, entries: list[tuple[list[Event], memoryview]]) -> None:
        try:
            self.tuning.on_record(seal, entries)
            if self.log is not None:
                self.log.offer(seal, entries)
        except Exception as error:
            if self._trainer_alive:
                raise  # it sends everything anew
            self.faults.failed(error)  # of the log, which notices the gap: the replica is sound

    @property
    def _drained(self) -> bool:
        """Everything the trainer sealed has been redone, also what came since the ring was read."""
        waits = self.intake.record_waits or self.intake.ring.readable
        return not waits and not self.intake.gap

    # ------------------------------------------------------------------ the store

    def _keep_cadence(self) -> None:
        if self.log is not None and self._alone:
            self.log.nowhere = self.presence.lost or self.base_writer.homeless
        if self.log is not None and self._alone and not self.presence.lost:
            leaving = self._terminated or not self._trainer_alive
            state = self.base_writer.state
            self.log.look_after(
                self.base_writer.run_id,
                state.term,
                state.durable,
                reached=state.reached,
                fits=self.base_writer.base_fits(self.config.census),
                now=leaving,
                base_bytes=lambda: self.base_scheduler.base_bytes,
                clears_up=self.base_writer.clears_up,
            )
        if self._alone:
            self.shipper.look_after(self.base_writer.state.term, self.log)
        self.tuning.look_after()
        if self._distrusted:
            return  # nothing that could be written
        if not self._trainer_alive and self._drained and self._alone:
            self.intake.drop_unsealed()
        if self._terminated and self._drained:
            if self._alone:
                self.base_scheduler.write_now()
            self._done = True
        elif self._alone:
            asked = any(
                isinstance(w.request, control.AskFlush | control.AskClose)
                and self.intake.step >= w.request.step
                for w in self._waiters
            )
            self.base_scheduler.persist_if_due(
                asked=asked,
                last_words=not self._trainer_alive and self._drained,
                moving=self._trainer_alive,
                log_broken=self.log is not None and self.log.broken,
            )

    def _go_away_when_idle(self) -> None:
        if self._trainer_alive or self._distrusted or not self._drained or self.base_writer.busy:
            return
        idle = time.monotonic() - self._idle_since
        patience = duration_seconds("tuning.idle_exit", self.options.tuning.idle_exit)
        if (
            idle > _GIVE_UP_IDLES * patience
            or self.base_writer.state.fenced  # it may write nothing more, and others have gone on
            or (not self.replica.complete and self._alone)
            or (idle > patience and not self.base_scheduler.has_news and self._shipped)
        ):
            log.info("shadow_idle seconds=%.0f step=%d", idle, self.intake.step)
            self._done = True

    @property
    def _shipped(self) -> bool:
        return self.shipper.settled(self.base_writer.state, tagged=self.lookout.seen.tagged)

    def _look(self) -> Seen:
        return Seen(self.base_writer.what_is_lost(), self.shipper.has_all_tags())

    # ------------------------------------------------------------------ requests

    def _answer_requests(self) -> None:
        self.board.put_up(self.status())  # before others hear of what it tells
        self.descriptors.serve(self.handover.descriptors())
        while (received := self.control.receive()) is not None:
            look = 0 if isinstance(received[1], control.AskStatus) else self.lookout.ask()
            self._waiters.append(Waiter(*received, self.base_writer.state.failures_total, look))
        self._waiters = [waiter for waiter in self._waiters if not self._is_answered(waiter)]

    def _is_answered(self, waiter: Waiter) -> bool:
        """What fails on the way is the answer: nobody waits for one that cannot come."""
        try:
            return self._answer(waiter)
        except Exception as error:  # noqa: BLE001 — boundary: it is told, here and there
            self.faults.failed(error)
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            self.control.answer(waiter.route, control.Answer(error=told, status=self._finished))
            return True

    def _answer(self, waiter: Waiter) -> bool:
        """Try to answer; False keeps the request waiting for the next turn."""
        route, request = waiter.route, waiter.request
        if isinstance(request, control.AskStatus):
            self.control.answer(route, control.Answer(status=self.status()))
        elif isinstance(request, control.AskRetire):
            self._answer_retire(route, request)
        elif isinstance(request, control.AskDefer):
            self._successor = request
            self.control.answer(route, control.Answer())
        elif isinstance(request, control.AskLeave):
            self._trainer_gone()
            self.control.answer(route, control.Answer())
        elif isinstance(request, control.AskYield):
            return self._answer_yield(route)
        elif isinstance(request, control.AskStop):
            return self._answer_stop(waiter)
        else:
            return self._answer_durable(waiter, request)
        return True

    def _answer_retire(self, route: list[bytes], request: control.AskRetire) -> None:
        if request.unless_speaking and self._alone:
            self.control.answer(route, control.Answer(error="this shadow speaks for the run"))
            return
        self.control.answer(route, control.Answer())
        self._done = self._retired = True
        self._closed = self._trainer_alive  # it goes on with another shadow

    def _answer_yield(self, route: list[bytes]) -> bool:
        if not self._drained or self._succeeded:
            return False
        if not self.intake.whole or self._distrusted or self.intake.drifted:
            why = "this shadow holds no complete state"
            answer = control.Answer(error=why, status=self._finished)
        else:
            handle = self.handover.handle(self.base_writer.state.term)
            answer = control.Answer(handle=handle, status=self._finished)
            self._yielded = True
        self.control.answer(route, answer)
        return True

    @property
    def _finished(self) -> dict[str, Any]:
        return {"finished_step": max(self.intake.sealed_step, self.intake.ring.dropped_step)}

    def _answer_stop(self, waiter: Waiter) -> bool:
        route = waiter.route
        if self._trainer_alive and not self._trainer.gone:
            self.control.answer(route, control.Answer(error="its trainer lives"))
            return True
        if self._trainer_alive or not self._drained:
            return False
        if self.intake.whole and not self._distrusted and not self.intake.drifted:
            return self._answer_durable(waiter, control.AskClose(self.intake.step))
        self.control.answer(route, control.Answer(status=self.status()))
        self._done = True  # nothing that could be written
        return True

    @property
    def _succeeded(self) -> bool:
        """A successor lives: it retires us as soon as it holds the state, or leaves it to us."""
        heir = self._successor
        return heir is not None and process_start(heir.pid) == heir.start

    def _answer_durable(self, waiter: Waiter, request: control.AskFlush | control.AskClose) -> bool:
        route, state = waiter.route, self.base_writer.state
        if not self.lookout.has_answered(waiter.look):
            return False
        if lost := self.presence.lost:
            self.control.answer(route, control.Answer(error=lost, status=self.status()))
            return True
        if state.term and state.durable is not None and state.durable.step >= request.step:
            closes = isinstance(request, control.AskClose)
            if closes and not self._shipped:
                return False
            status = self.status()
            self.board.put_up(status)  # the writer may have got done since this was done last
            left = self.shipper.problem if closes else ""
            self.control.answer(route, control.Answer(status=status, error=left))
            self._done |= closes
            self._closed |= closes and self._trainer_alive
            return True
        if self._drained and not self._distrusted and self._lacks_state:
            self.control.answer(route, control.Answer(repair=True))
            return True
        # only a failure since it was asked is an answer: what failed earlier may have been mended
        new = state.fenced or state.failures_total > waiter.failures
        failed = (state.problem if new else "") or (
            self.faults.problem if self.faults.starts_over > START_OVER_MAX else ""
        )
        if failed and not self.base_writer.busy:
            self.control.answer(route, control.Answer(error=failed, status=self.status()))
            return True
        return False

    @property
    def _lacks_state(self) -> bool:
        """Only the trainer has what is wrong here, or not here: it sends that with its next seal."""
        return bool(self.intake.drifted) or not self.intake.whole or self.intake.waits_for_base

    def status(self) -> dict[str, Any]:
        return {
            **describe_process(
                self.config.survival,
                self._trainer.refused,
                self.control,
                self.board,
                self.descriptors,
            ),
            "trainer_pid": self.config.trainer_pid if self._trainer_alive else None,
            "warm": self.warmup.done,
            **describe_intake(self.intake),
            **self.presence.honest(
                describe_store(self.base_writer, self.log, self.shipper, self.config.log_is_resumed)
            ),
            "disk_forecast": self._outlook.latest,
            **self.tuning.describe(),
            "health": "degraded" if self._trouble else "ok",
            "problem": self._trouble,
        }

    @property
    def _trouble(self) -> str:
        logged = self.log.problem if self.log else ""
        stored = (
            self.presence.problem or self.base_writer.state.problem or self.base_scheduler.delayed
        )
        return stored or self.faults.problem or logged or self.shipper.problem

    # ------------------------------------------------------------------ the end

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True

    def _leave(self) -> None:
        if self.log is not None:
            self.log.wait(_LAST_SECONDS)
        if not self._retired:
            self.base_writer.wait(_LAST_SECONDS)  # old bases and logs are still being removed
        if self._closed:
            self.base_writer.say_closed()
        if not self._retired:
            self.presence.leave()
            self.shipper.finish(self.base_writer.state, _SHIP_LAST_SECONDS)
        self.descriptors.close()
        self.control.close()
        self.presence.remove_sockets()
