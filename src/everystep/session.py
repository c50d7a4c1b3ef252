"""`Run`: what a user holds. The only place in the trainer that wires the rooms together."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from everystep.capture.census import Models, Optimizers
from everystep.capture.ranks import refuse_many_ranks
from everystep.capture.state import UserState
from everystep.compression.compressor import described
from everystep.core.status import build_status, summary
from everystep.device.pages import refusals as page_lock_refusals
from everystep.ended import End
from everystep.errors import EverystepError, UsageError
from everystep.forks import disarm_in_forks
from everystep.lane.control import AskFlush, AskLeave, AskStatus
from everystep.lane.lock import TrainerLock
from everystep.lane.runtime import runtime_dir
from everystep.loop import Steps, Turn
from everystep.options import Options
from everystep.recorder import Recorder
from everystep.recover.meet import hold_run
from everystep.resuming import Resumption
from everystep.sealed import DURABLE_SECONDS, Sealed
from everystep.store.tags import check_tag_name, set_tag
from everystep.tell import tell

log = logging.getLogger("everystep")

_GLANCE_SECONDS = 0.2
_CLAIMED_MEANWHILE_MAX = 2
_T = TypeVar("_T")


class Run:
    """One attach of a run. Belongs to the thread that trains."""

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        path: Path,
        state: Mapping[str, Any] | None,
        options: Options,
    ) -> None:
        self.path = path
        self._step_when_disabled = 0
        self._recorder: Recorder | None = None
        self._lock: TrainerLock | None = None
        self._sealed: Sealed | None = None
        self._resumption: Resumption | None = None
        self.turn = Turn.SEALED
        self._rewound = False  # the turn of the loop in which rewind was called is void
        self._ended = End.NONE
        self._loop: weakref.ref[Steps] | None = None
        self._user_state = UserState(state)
        if options.enabled:
            disarm_in_forks(self)
            refuse_many_ranks()
            TrainerLock.end_earlier(runtime_dir(str(path)))
            folder, self._lock = hold_run(path)
            self._lock.hold_for(self._end_for_later)
            try:
                self._recorder = Recorder(path, folder, options, model, optimizer, self._user_state)
                self._recorder.holder = self  # its hooks keep both: a later attach can end them
                self._sealed = Sealed(self._recorder)
                self._resumption = Resumption(self._sealed, options, self._user_state)
                self._resumption.begin()
            except BaseException:
                self._end(failed=True)
                raise

    # ------------------------------------------------------------------ the loop

    @property
    def step(self) -> int:
        """Steps sealed so far; also the index of the step to come."""
        return self._recorder.step if self._recorder else self._step_when_disabled

    def steps(self, total: int) -> Iterator[int]:
        """Indices of the steps still to do, up to `total`; each turn seals the step before."""
        start = self.resume()
        if total < start:  # a finished job that was started again
            tell(f"{self.path} is at step {start}: steps({total}) has nothing left to do")
        steps = Steps(self, total)
        self._loop = weakref.ref(steps)
        return steps

    def begin_again(self) -> None:
        """A loop whose iterator was kept."""
        self.resume()

    def next_turn(self) -> None:
        """Seal the turn that `steps` has ended."""
        self._check_open()
        void = self._rewound and not (self._recorder and self._recorder.turn.calls)
        self._rewound = False
        if self.turn is not Turn.SEALED and not void:
            self._seal()

    def _end_open_turn(self) -> None:
        """Another loop begins. `break` has finished the turn before; a turn that an exception has left in its
        midst is taken back to the last seal, or its optimizer calls would be done twice."""
        self._check_open()
        calls = self._recorder.turn.calls if self._recorder else 0
        if self.turn is Turn.FINISHED:
            if calls or self._recorder is None:
                self._seal()
        elif self.turn is not Turn.SEALED or calls:
            self._take_back()
        self.turn = Turn.SEALED

    def _take_back(self) -> None:
        recorder, resumption = self._recorder, self._resumption
        if recorder is None or resumption is None:
            return
        if recorder.tap is not None and not recorder.tap.opened:
            return  # there is no seal to go back to
        self.turn = Turn.BROKEN  # until all of it is loaded
        resumption.take_back()

    def resume(self) -> int:
        """For loops that are not ours: restore random states, return the step to begin with."""
        self._end_open_turn()
        if self._resumption is not None:
            self._resumption.must_resume = False
        return self._resume()

    def _resume(self) -> int:
        self._check_open()
        if self._resumption is not None:
            self._resumption.restore_rng()
        if self._recorder is not None:
            self._recorder.open()
        return self.step

    def seal(self) -> None:
        """End a step in a loop that is not ours; `steps` does it by itself."""
        self._check_open()
        if self.turn is Turn.OPEN:
            raise UsageError(
                f"seal at step {self.step}: steps() seals every step by itself",
                hint="drop the call, or loop over range(run.resume(), total) instead",
            )
        self._tell_unused_rng()
        tap = self._recorder.tap if self._recorder else None
        if tap is not None and tap.opened and tap.phase.records and tap.seals.nothing_happened():
            raise UsageError(
                f"seal called twice at step {self.step}: nothing has happened since the last seal",
                hint="call it once a step; a skipped step shows in the state of a GradScaler or loader",
            )
        self._seal()

    def _tell_unused_rng(self) -> None:
        if self._resumption is not None and self._resumption.must_resume:
            self._resumption.forget_rng()
            log.warning(
                "everystep: run %s: this loop seals but never called run.resume(), so the random states of "
                "step %d were not restored at its start and training differs from an unbroken run; begin the "
                "loop with `for step in range(run.resume(), total)`",
                self.path,
                self.step,
            )

    def _seal(self) -> None:
        if self._recorder is None:
            self._step_when_disabled += 1
            return
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
        if self._lock is not None and (other := self._lock.taken_by()):
            self._recorder.halt(other)

    # ------------------------------------------------------------------ asking

    def flush(self, timeout_seconds: float = DURABLE_SECONDS) -> int:
        """Return once the newest sealed step is durable in the store."""
        self._resume()
        if self._sealed is not None:
            answer = self._sealed.make_durable(AskFlush(self.step), "flush", timeout_seconds)
            if answer.error:
                raise EverystepError(
                    f"flush {self.path} at step {self.step}: {answer.error}",
                    hint="training goes on; everystep status tells when the store has healed",
                )
        return self.step

    def report(self, value: float) -> None:
        """Tell how good the model is now; `keep_best` goes by it, and bases carry it from here on."""
        self._user_state.metric = float(value)

    def tag(self, name: str) -> int:
        """Make the newest sealed step durable and pin it: no retention rule removes its base."""
        check_tag_name(name)
        step = self.flush()
        if self._recorder is not None:
            set_tag(self.path, name, step)
        return step

    def status(self) -> dict[str, Any]:
        """The same document as `everystep status`, with the trainer's own figures."""
        recorder, resumption = self._recorder, self._resumption
        if recorder is None or resumption is None:
            return {
                "summary": "everystep is disabled for this run",
                "enabled": False,
                "step": self.step,
            }
        document: dict[str, Any] = {"run": str(self.path), "trainer_step": self.step}
        try:
            document |= recorder.ask(AskStatus(), 5).status
        except EverystepError as error:
            document |= {"health": "degraded", "problem": str(error), "shadow_step": None}
        if recorder.problem:
            document |= {"health": "degraded", "problem": recorder.problem}
        elif self._lock is not None and self._lock.problem:
            document |= {"health": "degraded", "problem": self._lock.problem}
        mode, why = recorder.mode
        at = document.get("shadow_step")
        document |= {
            "mode": mode,
            "mode_why": why,
            "disk_forecast": document.get("disk_forecast") or resumption.disk_forecast,
            "lag_steps": None if at is None else self.step - at,
            "resumed_from": resumption.resumed_from,
            "attach_seconds": resumption.attach_seconds,
            "compression": described(recorder.live.tensors if recorder.live else ()),
            **recorder.figures(),
            "slowdown_percent": recorder.health.slowdown_percent,
            "state_dict_seconds_total": self._user_state.seconds_total,
            "state_dict_seconds_max": self._user_state.seconds_max,
            "limitations": [*document.get("limitations", []), *page_lock_refusals],
        }
        return build_status(str(self.path), document)

    def rewind(self, step: int) -> int:
        """Take live training back to a retained step; the loop goes on from there."""
        self._check_open()
        resumption, turn = self._resumption, self.turn
        if resumption is None:
            raise UsageError("rewind: everystep is disabled for this run")
        found, live = resumption.find(step)
        self.turn = Turn.BROKEN  # until all of it is loaded
        resumption.rewind(found, live)
        self.turn = Turn.SEALED if turn is Turn.BROKEN else turn
        self._resume()
        for problem in found.problems:
            warnings.warn(f"everystep: {problem}", stacklevel=2)
        self._rewound = True
        return self.step

    # ------------------------------------------------------------------ ending

    def close(self) -> None:
        """Seal a finished step, make everything durable, and let the shadow go."""
        self._end(failed=False)

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        tiers = "disabled"
        if self._recorder is not None:
            ended = self._ended is not End.NONE
            tiers = self._ended.value if ended else self._describe_tiers(self._recorder)
        return f"<everystep.Run {self.path} at step {self.step}: {tiers}>"

    @staticmethod
    def _describe_tiers(recorder: Recorder) -> str:
        """For a look in passing: what is recorded, and what each fault would cost if the shadow says so at
        once."""
        mode, why = recorder.mode
        try:
            told = summary(recorder.ask(AskStatus(), _GLANCE_SECONDS).status)
        except EverystepError:
            told = "the shadow did not say at once what it holds"
        return f"{mode if mode == 'every step' else f'{mode} ({why})'}; {told}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(failed=kind is not None)

    def _end(self, *, failed: bool) -> None:
        recorder, sealed = self._recorder, self._sealed
        if self._ended is End.FORKED:
            return
        if self._ended is not End.NONE or recorder is None or sealed is None:
            self._ended = End.CLOSED
            if self._lock is not None:
                self._lock.close()
            return
        try:
            if failed:  # an unfinished step does not count; the shadow keeps the one before
                if recorder.tap is not None:
                    recorder.tap.remove()  # copies under way land before the shadow is told
                with contextlib.suppress(EverystepError):
                    recorder.ask(AskLeave(), 5)
            else:
                self._seal_last_turn()
                if not recorder.guarded(sealed.finish)():
                    problem = recorder.problem or "the last steps were not written"
                    warnings.warn(f"everystep: {self.path}: {problem}", stacklevel=3)
        finally:
            self._ended = End.CLOSED
            recorder.abandon()
            if self._lock is not None:
                self._lock.close()

    def _seal_last_turn(self) -> None:
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
        elif self._recorder is not None and self._recorder.turn.calls:
            self._seal()

    def _end_for_later(self) -> None:
        """This process attaches the run once more; whether this one's open step is whole cannot be told."""
        step = self.step
        self._end(failed=True)
        self._ended = End.BY_LATER
        warnings.warn(
            f"everystep: {self.path}: this process attaches the run again, so its earlier Run was closed "
            f"at step {step}; a step that was not sealed is dropped",
            stacklevel=5,
        )

    def disarm(self) -> None:
        """In a process that was forked: the run is the parent's."""
        if self._ended is End.NONE:
            self._ended = End.FORKED

    def _check_open(self) -> None:
        self._ended.check(self.path)
