"""What is asked of a shadow, and when it can be answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from everystep.core.roles import Role, RoleEvent
from everystep.lane import control
from everystep.lane.control import Answer
from everystep.lane.descriptors import DescriptorServer
from everystep.lane.runtime import ShadowCard
from everystep.shadow.faults import START_OVER_MAX
from everystep.shadow.handover import Handover
from everystep.shadow.persistence import Persistence
from everystep.shadow.receiving import Receiver
from everystep.shadow.succession import Succession
from everystep.shadow.threads import guarded


class Waiter(NamedTuple):
    """A request that was heard and not yet answered."""

    route: list[bytes]
    request: control.Request
    failures: int  # of the store, when it came
    look: int  # at the directory, which its answer has to wait for


class Requests:
    """Owned by the main thread. An answer is None as long as there is none."""

    def __init__(
        self,
        card: ShadowCard,
        status: Callable[[], dict[str, Any]],
        handover: Handover,
        receiver: Receiver,
        persistence: Persistence,
        succession: Succession,
    ) -> None:
        self.control = control.ControlServer(card.control)
        self.board = control.NoticeBoard(card.control)
        self.descriptors = DescriptorServer(Path(card.descriptors))
        self._status, self._handover, self._receiver = status, handover, receiver
        self._persistence, self._succession = persistence, succession
        self._waiters: list[Waiter] = []

    @property
    def waiting(self) -> bool:
        return bool(self._waiters)

    def wants_base(self, step: int) -> bool:
        """Somebody waits for a base, and the replica has come as far as they ask for."""
        kinds = control.AskFlush | control.AskClose
        asked = (w.request for w in self._waiters)
        return any(isinstance(request, kinds) and step >= request.step for request in asked)

    def look_after(self) -> None:
        """Hear what is asked, and answer what can be answered."""
        self.board.post(self._status())  # before others hear of what it tells
        self.descriptors.serve(self._handover.descriptors())
        base_writer, directory_watch = (
            self._persistence.base_writer,
            self._persistence.directory_watch,
        )
        while (received := self.control.receive()) is not None:
            look = 0 if isinstance(received[1], control.AskStatus) else directory_watch.ask()
            self._waiters.append(Waiter(*received, base_writer.trouble.failures_total, look))
        self._waiters = [waiter for waiter in self._waiters if not self._is_answered(waiter)]

    def _is_answered(self, waiter: Waiter) -> bool:
        answer = guarded(lambda: self._answer(waiter), self._failed)
        if answer is not None:
            self.control.answer(waiter.route, answer)
        return answer is not None

    def _failed(self, error: Exception) -> Answer:
        """What fails on the way is the answer: nobody waits for one that cannot come."""
        self._receiver.faults.failed(error)
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        return Answer(error=told, status=self._receiver.finished)

    def _answer(self, waiter: Waiter) -> Answer | None:
        request = waiter.request
        if isinstance(request, control.AskStatus):
            return Answer(status=self._status())
        if isinstance(request, control.AskRetire):
            return self._retire(request)
        if isinstance(request, control.AskDefer):
            self._succession.announced(request)
            return Answer()
        if isinstance(request, control.AskLeave):
            self._succession.trainer_left()
            return Answer()
        if isinstance(request, control.AskYield):
            return self._yield()
        if isinstance(request, control.AskStop):
            return self._stop(waiter)
        return self._make_durable(waiter, request)

    def _retire(self, request: control.AskRetire) -> Answer:
        if request.unless_speaking and self._succession.alone:
            return Answer(error="this shadow speaks for the run")
        self._succession.happens(RoleEvent.RETIRED)
        return Answer()

    def _yield(self) -> Answer | None:
        receiver, succession = self._receiver, self._succession
        if not receiver.drained or succession.has_heir:
            return None
        if not receiver.sound:
            why = "this shadow holds no complete state"
            return Answer(error=why, status=receiver.finished)
        if succession.role is Role.FOLLOWING:
            why = "another shadow speaks for the run"
            return Answer(error=why, status=receiver.finished)
        handle = self._handover.handle(self._persistence.base_writer.state.term)
        succession.happens(RoleEvent.YIELDS)
        return Answer(handle=handle, status=receiver.finished)

    def _stop(self, waiter: Waiter) -> Answer | None:
        receiver, succession = self._receiver, self._succession
        if succession.trainer_lives:
            # it may be ending just now: the next turn tells
            return None if succession.trainer.gone else Answer(error="its trainer lives")
        if not receiver.drained:
            return None
        if receiver.sound:
            return self._make_durable(waiter, control.AskClose(receiver.intake.step))
        succession.happens(RoleEvent.ENDS, "stopped, and there is nothing that could be written")
        return Answer(status=self._status())

    def _make_durable(
        self, waiter: Waiter, request: control.AskFlush | control.AskClose
    ) -> Answer | None:
        receiver, persistence = self._receiver, self._persistence
        if not persistence.directory_watch.has_answered(waiter.look):
            return None
        if lost := persistence.directory_watch.state.lost:
            return Answer(error=lost, status=self._status())
        if persistence.has_durable(request.step):
            return self._is_durable(closes=isinstance(request, control.AskClose))
        if receiver.drained and not receiver.distrusted and receiver.lacks_state:
            return Answer(repair=True)
        failed = self._failure_since(waiter)
        if failed and not persistence.base_writer.busy:
            return Answer(error=failed, status=self._status())
        return None

    def _is_durable(self, *, closes: bool) -> Answer | None:
        if closes and not self._persistence.shipped:
            return None
        status = self._status()
        self.board.post(status)  # the writer may have got done since this was done last
        if closes:
            self._succession.happens(RoleEvent.CLOSED)
        return Answer(status=status, error=self._persistence.shipper.problem if closes else "")

    def _failure_since(self, waiter: Waiter) -> str:
        """Only a failure since it was asked is an answer: what failed earlier may have been mended."""
        trouble, faults = self._persistence.base_writer.trouble, self._receiver.faults
        new = trouble.fenced or trouble.failures_total > waiter.failures
        hopeless = faults.problem if faults.starts_over > START_OVER_MAX else ""
        return (trouble.problem if new else "") or hopeless

    def close(self) -> None:
        self.descriptors.close()
        self.control.close()
