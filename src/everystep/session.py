"""`Run`: what a user holds. The only place in the trainer that wires the rooms together."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from everystep.capture.census import LiveCensus, Models, Optimizers
from everystep.capture.ranks import refuse_many_ranks
from everystep.capture.rng import check_rng, restore_rng
from everystep.capture.state import UserState
from everystep.compression.compressor import described
from everystep.core.forecast import check_fits
from everystep.core.resume import nothing_found
from everystep.core.status import build_status, summary
from everystep.device.pages import refusals as page_lock_refusals
from everystep.ended import End
from everystep.errors import EverystepError, Fenced, NothingToRecover, UsageError
from everystep.forks import disarm_in_forks
from everystep.lane.control import AskFlush, AskLeave, AskStatus
from everystep.lane.lock import TrainerLock
from everystep.lane.runtime import runtime_dir
from everystep.loading import give_back_groups, load_point
from everystep.loop import Steps, Turn
from everystep.options import Options
from everystep.recorder import Recorder
from everystep.recover.find import Found, find_newest, resumed_line
from everystep.recover.load import (
    check_model,
    find_and_load,
    remove_later_groups,
)
from everystep.recover.meet import bring_newest, check_resume, hold_run, point_here, shadow_of
from everystep.recover.script import NO_DIFFERENCE, check_override, compare_values, keep_values
from everystep.shadow.outlook import look_ahead
from everystep.store.tags import check_tag_name, set_tag
from everystep.tell import tell

log = logging.getLogger("everystep")

_DURABLE_SECONDS = 3600.0
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
        self._options = options
        self._disk_forecast: dict[str, Any] = {}
        self._bucket = options.bucket
        self._step_when_disabled = 0
        self._recorder: Recorder | None = None
        self._lock: TrainerLock | None = None
        self.turn = Turn.SEALED
        self._overridden = False
        self._rewound = False  # the turn of the loop in which rewind was called is void
        self._ended = End.NONE
        self._resumed_from = ""
        self._attach_seconds: dict[str, float] = {}
        self._rng_to_restore: bytes | None = None
        self._must_resume = False  # steps were resumed, and no loop has called resume() yet
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
                self._begin(self._recorder, folder)
            except BaseException:
                self._end(failed=True)
                raise

    def _begin(self, recorder: Recorder, folder: Path) -> None:
        """See what there is to resume from, and go on from it."""
        live = self._timed("census", recorder.census)
        check_override(self._options.override, live.optimizers, self._user_state.members)
        resume = self._options.resume
        adopts = check_resume(self.path, shadow_of(self.path, folder), resume)
        if self._bucket is not None:
            log.info("tiers run=%s bucket=%s", self.path, self._bucket)
            self._timed("fetch", bring_newest, self.path, self._bucket, folder, adopts=adopts)
            check_resume(self.path, shadow_of(self.path, folder), resume)  # of what was there
        for _ in range(_CLAIMED_MEANWHILE_MAX):
            recorder.standing.look()
            try:
                self._go_on(recorder, folder, live, adopts=adopts)
            except Fenced as error:  # what we have loaded is not the newest any more
                log.info("claimed_meanwhile run=%s: %s", self.path, error)
                live = recorder.census()
            else:
                return
        recorder.standing.look()
        self._go_on(recorder, folder, live, adopts=adopts)

    def _go_on(
        self,
        recorder: Recorder,
        folder: Path,
        live: LiveCensus,
        *,
        adopts: bool = False,
        resumes: bool = True,
    ) -> None:
        """Find the newest point, load it, and connect to a shadow that goes on from it."""
        recorder.versions = [0] * len(live.tensors)
        exact = self._options.residuals == "exact"
        done, card = find_and_load(
            partial(self._timed, "find", find_newest, self.path, folder, exact=exact),
            lambda found: self._load(recorder, live, found, resumes=resumes),
        )
        if done is None and not resumes:
            raise EverystepError(
                f"run {self.path}: the turn at step {self.step} was left in its midst, and the shadow could "
                "not give the state of its start back",
                hint="attach again in a new process; everystep status tells what there is to go on from",
            )
        if done is None:
            nothing_found(str(self.path), self._options.resume)
            self._look_ahead(live, resumes=False)
            self._timed("connect", recorder.connect, live, predecessor=card)
            return
        found, live = done
        if adopts:
            recorder.standing.point = point_here(self.path, found.point)
        try:
            self._look_ahead(live, resumes=True)
            # a shadow's memory is handed on only if it describes exactly what is trained now
            whole = found if found.holding and found.census.same_training(live.census) else None
            self._timed(
                "connect",
                recorder.connect,
                live,
                found=whole,
                predecessor=card,
                opening_rng=found.session.rng,
            )
            if self._overridden:  # a crash before the first step must not bring the old values back
                recorder.open_as_loaded()
        finally:
            found.close()
        for problem in found.problems:
            warnings.warn(f"everystep: {problem}", stacklevel=4)
        if resumes:
            tell(resumed_line(str(self.path), found))

    def _look_ahead(self, live: LiveCensus, *, resumes: bool) -> None:
        """Warn if the disk will not last. Where nothing could be lost yet, refuse one that is too small."""
        with contextlib.suppress(OSError):  # a disk that does not answer is the shadow's business
            ahead = look_ahead(self.path, live.census, self._options)
            if not resumes:
                check_fits(str(self.path), live.census, ahead.free_bytes)
            self._disk_forecast = msgspec.to_builtins(ahead)
            if ahead.warning:
                warnings.warn(f"everystep: {self.path}: {ahead.warning}", stacklevel=5)

    def _timed(self, phase: str, work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """How long attach takes, and for what, is part of the status."""
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            before = self._attach_seconds.get(phase, 0.0)
            self._attach_seconds[phase] = before + time.perf_counter() - began

    def _load(
        self, recorder: Recorder, live: LiveCensus, found: Found, *, resumes: bool = False
    ) -> LiveCensus:
        """Bring live objects to a found point; groups added during the run come back too."""
        self._user_state.check(found.session.state)
        check_rng(found.session.rng)
        compared = NO_DIFFERENCE
        if resumes:
            compared = compare_values(
                live.keyed, live.census.script, found, self._user_state.members
            )
        if give_back_groups(found, live, self.path):
            live = self._timed("census", recorder.census)
        recorder.versions = self._timed("load", load_point, found, live, self.path, optimizers=True)
        self._user_state.restore(found.session.state)
        keep_values(live.keyed, compared.kept)
        self._overridden = bool(compared.kept)
        found.problems.extend([compared.told] if compared.told else [])
        self._user_state.metric = found.session.metric
        self._rng_to_restore = found.session.rng
        self._must_resume = resumes
        recorder.step, recorder.standing.point = found.point.step, found.point
        self._resumed_from = found.source
        return self._timed("census", recorder.census)

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
        return Steps(self, total)

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
        recorder, step = self._recorder, self.step
        if recorder is None or (recorder.tap is not None and not recorder.tap.opened):
            return  # there is no seal to go back to
        if not recorder.holds_last_seal():
            raise EverystepError(
                f"run {self.path}: the turn at step {step} was left in its midst, and the shadow does not "
                f"hold the state of its start ({recorder.mode[1]})",
                hint="attach again to go on from the newest step there is, or use run.rewind",
            )
        assert recorder.tap is not None
        live = recorder.tap.live
        remove_later_groups(live.census, live.keyed)
        recorder.drop()
        self._go_on(recorder, recorder.folder, recorder.census(), resumes=False)
        log.warning(
            "everystep: run %s: the turn at step %d was left in its midst; training is back at step %d",
            self.path,
            step,
            self.step,
        )

    def resume(self) -> int:
        """For loops that are not ours: restore random states, return the step to begin with."""
        self._end_open_turn()
        self._must_resume = False
        return self._resume()

    def _resume(self) -> int:
        self._check_open()
        if self._rng_to_restore is not None:
            restore_rng(self._rng_to_restore)
            self._rng_to_restore = None
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
        if tap is not None and tap.opened and tap.flowing and tap.nothing_happened():
            raise UsageError(
                f"seal called twice at step {self.step}: nothing has happened since the last seal",
                hint="call it once a step; a skipped step shows in the state of a GradScaler or loader",
            )
        self._seal()

    def _tell_unused_rng(self) -> None:
        if self._must_resume:
            self._must_resume, self._rng_to_restore = False, None
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
        self._recorder.seal()
        if self._lock is not None and (other := self._lock.taken_by()):
            self._recorder.halt(other)

    # ------------------------------------------------------------------ asking

    def flush(self, timeout_seconds: float = _DURABLE_SECONDS) -> int:
        """Return once the newest sealed step is durable in the store."""
        self._resume()
        if self._recorder is not None:
            answer = self._recorder.ask_durable(AskFlush(self.step), "flush", timeout_seconds)
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
        recorder = self._recorder
        if recorder is None:
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
        mode, why = recorder.mode
        at = document.get("shadow_step")
        document |= {
            "mode": mode,
            "mode_why": why,
            "disk_forecast": document.get("disk_forecast") or self._disk_forecast,
            "lag_steps": None if at is None else self.step - at,
            "resumed_from": self._resumed_from,
            "attach_seconds": self._attach_seconds,
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
        recorder = self._recorder
        if recorder is None:
            raise UsageError("rewind: everystep is disabled for this run")
        found, _ = find_newest(self.path, None, step)
        if found is None:
            raise NothingToRecover(
                f"rewind {self.path} to step {step}: its base is damaged",
                hint="everystep verify lists the steps that are left",
            )
        self._user_state.check(found.session.state)
        live = recorder.census()
        check_model(live.census, found, str(self.path))
        recorder.wait_for_successor()
        predecessor = recorder.card()
        recorder.drop()
        remove_later_groups(found.census, live.keyed)
        live = self._load(recorder, recorder.census(), found)
        recorder.connect(live, predecessor=predecessor, opening_rng=found.session.rng)
        self._resume()
        for problem in found.problems:
            warnings.warn(f"everystep: {problem}", stacklevel=2)
        self._rewound = True
        log.info("rewound run=%s step=%d", self.path, step)
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
        recorder = self._recorder
        if self._ended is End.FORKED:
            return
        if self._ended is not End.NONE or recorder is None:
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
                if recorder.turn.calls and self.turn is not Turn.BROKEN:
                    self._seal()
                elif recorder.turn.calls:
                    log.warning(
                        "everystep: run %s: an exception left the turn at step %d; it is not sealed",
                        self.path,
                        self.step,
                    )
                if not recorder.guarded(recorder.finish)():
                    problem = recorder.problem or "the last steps were not written"
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
