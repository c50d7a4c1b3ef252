"""The turns of a training loop: a finished one is sealed, one that an exception left is taken back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from everystep.errors import UsageError
from everystep.lane.lock import TrainerLock
from everystep.loop import Steps, Turn
from everystep.recorder import Recorder
from everystep.resuming import Resumption

log = logging.getLogger("everystep")


class Turns:
    """Of one attach, owned by the training thread. `check_open` refuses a run that has ended."""

    def __init__(
        self,
        recorder: Recorder,
        resumption: Resumption,
        lock: TrainerLock,
        check_open: Callable[[], None],
    ) -> None:
        self.path = recorder.path
        self.turn = Turn.SEALED
        self._recorder, self._resumption, self._lock = recorder, resumption, lock
        self._check_open = check_open
        self._is_void = False  # rewind was called in this turn
        self._loop: weakref.ref[Steps] | None = None

    @property
    def step(self) -> int:
        return self._recorder.step

    def loop(self, total: int) -> Steps:
        steps = Steps(self, total)
        self._loop = weakref.ref(steps)
        return steps

    # ------------------------------------------------------------------ beginning

    def resume(self) -> None:
        """A loop begins. `break` has finished the turn before; a turn that an exception has left in its
        midst is taken back to the last seal, or its optimizer calls would be done twice."""
        self._check_open()
        calls = self._recorder.subject.turn.calls
        if self.turn is Turn.FINISHED:
            if calls:
                self._seal()
        elif self.turn is not Turn.SEALED or calls:
            self._take_back()
        self.turn = Turn.SEALED
        self._resumption.must_resume = False
        self.go_on()

    def go_on(self) -> None:
        """From the state that was sealed last."""
        self._check_open()
        self._resumption.restore_rng()
        self._recorder.open()

    def _take_back(self) -> None:
        if self._recorder.is_opened:
            self.turn = Turn.BROKEN  # until all of it is loaded
            self._resumption.take_back()

    def rewind(self, step: int) -> list[str]:
        """To a kept step; returns what was wrong with what lies behind it."""
        self._check_open()
        found, live = self._resumption.find(step)
        turn, self.turn = self.turn, Turn.BROKEN  # until all of it is loaded
        self._resumption.rewind(found, live)
        self.turn = Turn.SEALED if turn is Turn.BROKEN else turn
        self.go_on()
        self._is_void = True
        return found.problems

    # ------------------------------------------------------------------ ending

    def next_turn(self) -> None:
        self._check_open()
        void = self._is_void and not self._recorder.subject.turn.calls
        self._is_void = False
        if self.turn is not Turn.SEALED and not void:
            self._seal()

    def seal(self) -> None:
        """Where the loop is the user's own."""
        self._check_open()
        _refuse_open_turn(self)
        self._tell_unused_rng()
        if self._recorder.nothing_happened():
            raise UsageError(
                f"seal called twice at step {self.step}: nothing has happened since the last seal",
                hint="call it once a step; a skipped step shows in the state of a GradScaler or loader",
            )
        self._seal()

    def _tell_unused_rng(self) -> None:
        if self._resumption.must_resume:
            self._resumption.forget_rng()
            log.warning(
                "everystep: run %s: this loop seals but never called run.resume(), so the random states of "
                "step %d were not restored at its start and training differs from an unbroken run; begin the "
                "loop with `for step in range(run.resume(), total)`",
                self.path,
                self.step,
            )

    def _seal(self) -> None:
        if self.turn is Turn.BROKEN:
            raise UsageError(
                f"seal at step {self.step}: an exception has left a turn, a seal or a rewind in its midst: "
                "nobody knows the state that training is in",
                hint="begin the loop again with run.steps(...) or run.resume(), which take training back to "
                "the last seal; or call run.rewind",
            )
        try:
            self._recorder.seal()
        except BaseException:  # Ctrl-C, or a state_dict() that raises
            self.turn = Turn.BROKEN
            raise
        if other := self._lock.taken_by():
            self._recorder.halt(other)

    def seal_last(self) -> None:
        """The run is closed: a finished turn counts."""
        loop = self._loop() if self._loop is not None else None
        if self.turn is Turn.OPEN and not (loop is not None and loop.is_running()):
            self.turn = Turn.BROKEN  # its iterator was kept, and shows nothing of how it was left
        if self.turn is Turn.BROKEN:
            log.warning(
                "everystep: run %s: an exception left the turn at step %d, or nobody can tell because its "
                "iterator was kept (`for step in run.steps(...)` keeps none); it is not sealed",
                self.path,
                self.step,
            )
        elif self._recorder.subject.turn.calls:
            self._seal()


class Unrecorded:
    """The turns of a run that is disabled: they are counted, and that is all."""

    def __init__(self, check_open: Callable[[], None]) -> None:
        self.step = 0
        self.turn = Turn.SEALED
        self._check_open = check_open

    def loop(self, total: int) -> Steps:
        return Steps(self, total)

    def resume(self) -> None:
        self._check_open()
        self.step += self.turn is Turn.FINISHED
        self.turn = Turn.SEALED

    def next_turn(self) -> None:
        self._check_open()
        self.step += self.turn is not Turn.SEALED

    def seal(self) -> None:
        self._check_open()
        _refuse_open_turn(self)
        self.step += 1

    def go_on(self) -> None:
        self._check_open()

    def rewind(self, _: int) -> list[str]:
        self._check_open()
        raise UsageError("rewind: everystep is disabled for this run")


def _refuse_open_turn(turns: Turns | Unrecorded) -> None:
    if turns.turn is Turn.OPEN:
        raise UsageError(
            f"seal at step {turns.step}: steps() seals every step by itself",
            hint="drop the call, or loop over range(run.resume(), total) instead",
        )
