"""`Run`: what a user holds. The place in the trainer that wires the rooms together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from everystep.capture.census import Models, Optimizers
from everystep.capture.refusals import refuse_many_ranks
from everystep.capture.state import UserState
from everystep.capture.subject import Subject
from everystep.compression.compressor import described
from everystep.console import announce
from everystep.core.status import build_status, summary
from everystep.device.pages import refusals as page_lock_refusals
from everystep.errors import EverystepError, UsageError
from everystep.forks import disarm_in_forks
from everystep.lane.control import AskFlush, AskStatus
from everystep.lane.lock import TrainerLock
from everystep.lane.runtime import runtime_dir
from everystep.options import Options
from everystep.recorder import Recorder
from everystep.recover.meet import hold_run
from everystep.resuming import Resumption
from everystep.sealed import DURABLE_SECONDS, Sealed
from everystep.store.tags import check_tag_name, set_tag
from everystep.turns import Turns, Unrecorded

_GLANCE_SECONDS = 0.2


class End(StrEnum):
    """What has become of a Run."""

    NONE = "none"
    CLOSED = "closed"
    BY_LATER = "ended by a later attach of this process"
    FORKED = "left to the process that this one was forked from"

    def check(self, run: Path) -> None:
        """UsageError unless the run is open."""
        if self is End.BY_LATER:
            raise UsageError(
                f"run {run}: it was closed by a later attach in this process",
                hint="go on with the Run that attach returned last",
            )
        if self is End.FORKED:
            raise UsageError(
                f"run {run}: this process was forked from the trainer, which alone may go on with it",
                hint="train in the process that attached, or leave the loop where you fork",
            )
        if self is End.CLOSED:
            raise UsageError(f"run {run}: it is closed", hint="attach again")


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
        self._ended = End.NONE
        self._user_state = UserState(state)
        self._lock: TrainerLock | None = None
        self._recorder: Recorder | None = None
        self._turns: Turns | Unrecorded = Unrecorded(self._check_open)
        if options.enabled:
            disarm_in_forks(self)
            refuse_many_ranks()
            TrainerLock.end_earlier(runtime_dir(str(path)))
            folder, self._lock = hold_run(path)
            self._lock.hold_for(self._end_for_later)
            try:
                subject = Subject(
                    model,
                    optimizer,
                    self._user_state,
                    log=options.tuning.log,
                    override=options.override,
                )
                self._recorder = Recorder(path, folder, options, subject, holder=self)
                self._sealed = Sealed(self._recorder)
                self._resumption = Resumption(self._sealed, options, self._user_state)
                self._turns = Turns(self._recorder, self._resumption, self._lock, self._check_open)
                self._resumption.begin()
            except BaseException:
                self._end(failed=True)
                raise

    # ------------------------------------------------------------------ the loop

    @property
    def step(self) -> int:
        """Steps sealed so far; also the index of the step to come."""
        return self._turns.step

    def steps(self, total: int) -> Iterator[int]:
        """Indices of the steps still to do, up to `total`; each turn seals the step before."""
        start = self.resume()
        if total < start:  # a finished job that was started again
            announce(f"{self.path} is at step {start}: steps({total}) has nothing left to do")
        return self._turns.loop(total)

    def resume(self) -> int:
        """For loops that are not ours: restore random states, return the step to begin with."""
        self._turns.resume()
        return self.step

    def seal(self) -> None:
        """End a step in a loop that is not ours; `steps` does it by itself."""
        self._turns.seal()

    # ------------------------------------------------------------------ asking

    def flush(self, timeout_seconds: float = DURABLE_SECONDS) -> int:
        """Return once the newest sealed step is durable in the store."""
        self._turns.go_on()
        if self._recorder is not None:
            answer = self._sealed.make_durable(AskFlush(self.step), "flush", timeout_seconds)
            if answer.error:
                raise EverystepError(
                    f"flush {self.path} at step {self.step}: {answer.error}",
                    hint="training goes on; everystep status tells when the store has healed",
                )
        return self.step

    def report(self, value: float) -> None:
        """Tell how good the model is now; `Keep(best=…)` goes by it, and bases carry it from here on."""
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
        recorder = self._recorder
        if recorder is None:
            return {
                "summary": "everystep is disabled for this run",
                "enabled": False,
                "step": self.step,
            }
        document: dict[str, Any] = {"run": str(self.path), "trainer_step": self.step}
        try:
            document |= recorder.link.ask(AskStatus(), 5).status
        except EverystepError as error:
            document |= {"health": "degraded", "problem": str(error), "shadow_step": None}
        if recorder.link.problem:
            document |= {"health": "degraded", "problem": recorder.link.problem}
        elif self._lock is not None and self._lock.problem:
            document |= {"health": "degraded", "problem": self._lock.problem}
        mode, why = recorder.mode
        at = document.get("shadow_step")
        document |= {
            "mode": mode,
            "mode_why": why,
            "disk_forecast": document.get("disk_forecast") or self._resumption.disk_forecast,
            "lag_steps": None if at is None else self.step - at,
            "resumed_from": self._resumption.resumed_from,
            "attach_seconds": self._resumption.attach_seconds,
            "compression": described(recorder.subject.live.tensors),
            **recorder.figures(),
            "slowdown_percent": recorder.health.slowdown_percent,
            "state_dict_seconds_total": self._user_state.seconds_total,
            "state_dict_seconds_max": self._user_state.seconds_max,
            "limitations": [*document.get("limitations", []), *page_lock_refusals],
        }
        return build_status(str(self.path), document)

    def rewind(self, step: int) -> int:
        """Take live training back to a kept step; the loop goes on from there."""
        for problem in self._turns.rewind(step):
            warnings.warn(f"everystep: {problem}", stacklevel=2)
        return self.step

    # ------------------------------------------------------------------ ending

    def close(self) -> None:
        """Seal a finished step, make everything durable, and end the shadow."""
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
            told = summary(recorder.link.ask(AskStatus(), _GLANCE_SECONDS).status)
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
        if self._ended is End.FORKED:
            return
        recorder, turns = self._recorder, self._turns
        if self._ended is not End.NONE or recorder is None or isinstance(turns, Unrecorded):
            self._ended = End.CLOSED
            if self._lock is not None:
                self._lock.close()
            return
        try:
            if failed:
                recorder.fail()
            else:
                turns.seal_last()
                if not recorder.boundary.guard(self._sealed.finish)():
                    problem = recorder.link.problem or "the last steps were not written"
                    warnings.warn(f"everystep: {self.path}: {problem}", stacklevel=3)
        finally:
            self._ended = End.CLOSED
            recorder.abandon()
            if self._lock is not None:
                self._lock.close()

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
