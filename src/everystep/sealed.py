"""The last sealed step: flush, tag and close wait until it is durable, and a turn is taken back to it."""

from __future__ import annotations

import time

from everystep.capture.turn import SealedValues
from everystep.connection import START_SECONDS, WAIT_SECONDS
from everystep.core.phases import Phase
from everystep.errors import EverystepError, LaneTimeout, ShadowLost
from everystep.lane.control import Answer, AskClose, AskFlush, AskStatus
from everystep.lane.place import refuse_foreign
from everystep.recorder import Recorder
from everystep.waiting import DurableWait

DURABLE_SECONDS = 3600.0
_SHADOWS_MAX = 8


class Sealed:
    """The last sealed step. Owned by the training thread."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._path = recorder.path

    def finish(self) -> bool:
        """Make everything durable, and have the shadow end; True: it is done."""
        recorder = self.recorder
        recorder.tell_trouble()  # no seal will
        answer = self.make_durable(AskClose(recorder.step), "close", DURABLE_SECONDS)
        if answer.error:
            raise EverystepError(f"close {self._path} at step {recorder.step}: {answer.error}")
        if recorder.link.connection is not None:
            recorder.link.connection.shadow.wait_gone(10)
        return True

    def make_durable(
        self, request: AskFlush | AskClose, operation: str, timeout_seconds: float
    ) -> Answer:
        """Have everything sealed so far written; if our shadow has died, or dies meanwhile, by a new one that
        is given the same step. The time that its start takes counts."""
        deadline = time.monotonic() + timeout_seconds
        try:
            if self.recorder.link.connection is None:
                self._have_shadow(operation)
            return self._ask(request, operation, deadline)
        except ShadowLost:
            self._have_shadow(operation)
            return self._ask(request, operation, deadline)

    def _have_shadow(self, operation: str) -> None:
        recorder = self.recorder
        if recorder.link.connection is None:
            self._still_sealed(operation)
        recorder.look_after_shadow()
        for _ in range(_SHADOWS_MAX):
            if recorder.link.connection is not None or recorder.link.outage.is_final:
                break
            self._still_sealed(operation)
            if not recorder.link.starter.busy:
                recorder.start_beside()
            recorder.link.starter.wait()
            recorder.look_after_shadow()

    def _ask(self, request: AskFlush | AskClose, operation: str, deadline: float) -> Answer:
        """What the shadow says it lacks is sent first."""
        recorder = self.recorder
        while True:
            self.bring_up_to_date(operation)
            wait = DurableWait(self._path, operation, recorder.step, recorder.link.shadow)
            answer = recorder.link.ask(request, max(1.0, deadline - time.monotonic()), wait.look)
            if not answer.repair:
                return answer
            if time.monotonic() > deadline:
                raise LaneTimeout(
                    f"{operation} {self._path}: what the shadow holds was not repaired in time",
                    hint="everystep status names the atoms that keep differing",
                )
            self._seal_again(operation)

    def bring_up_to_date(self, operation: str) -> None:
        """Return when everything sealed so far is in the ring: what is left of a base goes now."""
        recorder = self.recorder
        if recorder.tap is not None:
            with recorder.boundary.or_replace():
                recorder.tap.open()
            self._send_base(operation)
            if recorder.tap is not None:
                recorder.tap.record.land()
        self.wait_for_successor()

    def is_held(self) -> bool:
        """Whether our shadow has the state of the last seal, which training has left since."""
        recorder = self.recorder
        tap = recorder.tap
        if tap is None or tap.phase is not Phase.RECORDING:
            return False
        tap.record.land()
        self.wait_for_successor()
        deadline = time.monotonic() + START_SECONDS
        while (
            recorder.link.ask(AskStatus(exact=True), START_SECONDS).status["shadow_step"]
            != recorder.step
        ):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _send_base(self, operation: str) -> None:
        """Seal the same step again until a base of it has been sent."""
        recorder = self.recorder
        deadline = time.monotonic() + WAIT_SECONDS
        while recorder.tap is not None and recorder.tap.phase is not Phase.RECORDING:
            if recorder.link.connection is None:
                raise ShadowLost(f"{operation} {self._path}: no shadow at the moment")
            what = f"{operation} {self._path}: a base of step {recorder.step} is sent"
            recorder.link.connection.pause(deadline, what)
            self._seal_again(operation)

    def _seal_again(self, operation: str) -> None:
        """The same step once more: it sends what the shadow has asked for."""
        recorder = self.recorder
        assert recorder.tap is not None
        with recorder.boundary.or_replace():
            recorder.tap.seal(recorder.step, self._still_sealed(operation), is_awaited=True)
        if recorder.tap is not None and recorder.tap.phase is Phase.OUTGROWN:
            recorder.change()  # this tap has sent nothing, and never will

    def wait_for_successor(self) -> None:
        """The shadow before speaks for the run until the new one holds its state."""
        recorder = self.recorder
        deadline = time.monotonic() + WAIT_SECONDS
        what = f"run {self._path}: a new shadow is handed the state of step {recorder.step}"
        while recorder.link.connection is not None and recorder.link.card() is None:
            refuse_foreign(recorder.link.folder, what)
            recorder.link.connection.pause(deadline, what)

    def _still_sealed(self, operation: str) -> SealedValues:
        """What the last seal said, if training is still there: else nobody can record that step any more."""
        recorder = self.recorder
        moved_on = recorder.subject.turn.has_moved_on()
        if moved_on is None:
            moved_on = recorder.tap is None or recorder.tap.seals.has_moved_on()
        if moved_on or recorder.subject.turn.sealed is None:
            left = (
                "the step after it has begun"
                if recorder.subject.turn.sealed
                else "its state could not be kept"
            )
            raise EverystepError(
                f"{operation} {self._path}: step {recorder.step} is not recorded ({recorder.mode[1]}), "
                f"and {left}",
                hint=f"call {operation} before anything of a step changes weights, buffers or gradients, or "
                "once it is sealed",
            )
        return recorder.subject.turn.sealed
