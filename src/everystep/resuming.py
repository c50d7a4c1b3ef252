"""Brings live training to a point of its run and has it recorded from there: at attach, when a turn is taken
back, by rewind."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from everystep.capture.census import LiveCensus
from everystep.capture.rng import check_recordable, check_rng, restore_rng
from everystep.capture.state import UserState
from everystep.console import announce
from everystep.core.forecast import check_fits
from everystep.core.resume import nothing_found
from everystep.errors import EverystepError, Fenced, NothingToRecover, ShadowLost
from everystep.options import Options
from everystep.recover.attempts import attempts
from everystep.recover.find import find_newest
from everystep.recover.groups import remove_later_groups
from everystep.recover.loader import Loader
from everystep.recover.meet import check_resume, point_here, shadow_of, sync_newest
from everystep.recover.point import RestorePoint, resumed_line
from everystep.recover.script import NO_DIFFERENCE, check_override, compare_values, keep_values
from everystep.sealed import Sealed
from everystep.shadow.disk_forecast import forecast_disk
from everystep.standing import Start

log = logging.getLogger("everystep")

_CLAIMED_MEANWHILE_MAX = 2
_T = TypeVar("_T")


class Resumption:
    """Of one attach. Owned by the training thread."""

    def __init__(self, sealed: Sealed, options: Options, user_state: UserState) -> None:
        self.path = sealed.recorder.path
        self._sealed, self._recorder = sealed, sealed.recorder
        self._options = options
        self._user_state = user_state
        self.disk_forecast: dict[str, Any] = {}
        self.resumed_from = ""
        self.attach_seconds: dict[str, float] = {}
        self.must_resume = False  # steps were resumed, and no loop has called resume() yet
        self._overridden = False
        self._rng: bytes | None = None  # random states that are to be restored when the loop begins

    def restore_rng(self) -> None:
        """The loop begins, or goes on."""
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def forget_rng(self) -> None:
        """The loop began without asking for them."""
        self.must_resume, self._rng = False, None

    # ------------------------------------------------------------------ attach

    def begin(self) -> None:
        """See what there is to resume from, and go on from it."""
        recorder, folder = self._recorder, self._recorder.link.folder
        check_recordable()
        live = self._timed("census", recorder.subject.census)
        check_override(self._options.override, live.optimizers, self._user_state.members)
        resume = self._options.resume
        adopts = check_resume(self.path, shadow_of(self.path, folder), resume)
        if (bucket := self._options.bucket) is not None:
            log.info("tiers run=%s bucket=%s", self.path, bucket)
            self._timed("fetch", sync_newest, self.path, bucket, folder, adopts=adopts)
            check_resume(self.path, shadow_of(self.path, folder), resume)  # of what was there
        for _ in range(_CLAIMED_MEANWHILE_MAX):
            recorder.link.starter.standing.look()
            try:
                self._go_on(live, adopts=adopts)
            except Fenced as error:  # what we have loaded is not the newest any more
                log.info("claimed_meanwhile run=%s: %s", self.path, error)
                live = recorder.subject.census()
            else:
                return
        recorder.link.starter.standing.look()
        self._go_on(live, adopts=adopts)

    def _go_on(self, live: LiveCensus, *, adopts: bool = False, resumes: bool = True) -> None:
        """Find the newest point, load it, and connect to a shadow that goes on from it."""
        recorder, folder = self._recorder, self._recorder.link.folder
        exact = self._options.tuning.residuals == "exact"
        start = Start(0, None, [0] * len(live.tensors))
        for attempt in attempts():
            with attempt:
                self._timed("find", attempt.find, self.path, folder, exact=exact)
                if attempt.found is not None:
                    start = self._load(live, attempt.found, resumes=resumes)
        found, card = attempt.found, attempt.card
        if found is None and not resumes:
            raise EverystepError(
                f"run {self.path}: the turn at step {recorder.step} was left in its midst, and the shadow "
                "could not give the state of its start back",
                hint="attach again in a new process; everystep status tells what there is to go on from",
            )
        if found is None:
            nothing_found(str(self.path), self._options.resume)
            self._forecast_disk(live, resumes=False)
            self._timed("connect", recorder.connect, start, predecessor=card)
            return
        live = recorder.subject.live
        if adopts:
            start = start._replace(point=point_here(self.path, found.line or found.point))
        try:
            self._forecast_disk(live, resumes=True)
            # a shadow's memory is handed on only if it describes exactly what is trained now
            whole = found if found.handle and found.census.same_training(live.census) else None
            self._timed(
                "connect",
                recorder.connect,
                start,
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
            announce(resumed_line(str(self.path), found))

    def _forecast_disk(self, live: LiveCensus, *, resumes: bool) -> None:
        """Warn if the disk will not last. Where nothing could be lost yet, refuse one that is too small."""
        with contextlib.suppress(OSError):  # a disk that does not answer is the shadow's business
            ahead = forecast_disk(self.path, live.census, self._options)
            if not resumes:
                check_fits(str(self.path), live.census, ahead.free_bytes)
            self.disk_forecast = msgspec.to_builtins(ahead)
            if ahead.warning:
                warnings.warn(f"everystep: {self.path}: {ahead.warning}", stacklevel=5)

    def _timed(self, phase: str, work: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """How long attach takes, and for what, is part of the status."""
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            before = self.attach_seconds.get(phase, 0.0)
            self.attach_seconds[phase] = before + time.perf_counter() - began

    def _load(self, live: LiveCensus, found: RestorePoint, *, resumes: bool = False) -> Start:
        """Bring live objects to a found point; groups added during the run come back too."""
        recorder = self._recorder
        self._check(found)
        compared = NO_DIFFERENCE
        if resumes:
            compared = compare_values(
                live.keyed, live.census.script, found, self._user_state.members
            )
        if Loader(found, live, self.path).give_back_groups():
            live = self._timed("census", recorder.subject.census)
        versions = self._timed("load", Loader(found, live, self.path).load)
        self._user_state.restore(found.session.state)
        keep_values(live.keyed, compared.kept)
        self._overridden = bool(compared.kept)
        found.problems.extend([compared.told] if compared.told else [])
        self._user_state.metric = found.session.metric
        self._rng = found.session.rng
        self.must_resume = resumes
        self.resumed_from = found.source
        self._timed("census", recorder.subject.census)
        return Start(found.point.step, found.line, versions)

    def _check(self, found: RestorePoint) -> None:
        self._user_state.check(found.session.state)
        check_rng(found.session.rng)

    # ------------------------------------------------------------------ back

    def take_back(self) -> None:
        """To the last seal, which training has left."""
        recorder, step = self._recorder, self._recorder.step
        if not self._sealed.is_held():
            raise EverystepError(
                f"run {self.path}: the turn at step {step} was left in its midst, and the shadow does not "
                f"hold the state of its start ({recorder.mode[1]})",
                hint="attach again to go on from the newest step there is, or use run.rewind",
            )
        assert recorder.tap is not None
        live = recorder.tap.record.live
        remove_later_groups(live.census, live.keyed)
        recorder.leave()
        self._go_on(recorder.subject.census(), resumes=False)
        log.warning(
            "everystep: run %s: the turn at step %d was left in its midst; training is back at step %d",
            self.path,
            step,
            recorder.step,
        )

    def find(self, step: int) -> tuple[RestorePoint, LiveCensus]:
        """A point to rewind to. Nothing live is changed, nor given up, before it is known to fit."""
        found, _ = find_newest(self.path, None, step)
        if found is None:
            raise NothingToRecover(
                f"rewind {self.path} to step {step}: its base is damaged",
                hint="everystep verify lists the steps that are left",
            )
        self._check(found)
        live = self._recorder.subject.census()
        Loader(found, live, self.path).check(later_groups=True)
        return found, live

    def rewind(self, found: RestorePoint, live: LiveCensus) -> None:
        """Load what was found, and record from there. If that fails, nobody knows the state of training."""
        recorder = self._recorder
        with contextlib.suppress(ShadowLost):  # one that has died is handed nothing
            self._sealed.wait_for_successor()
        predecessor = recorder.link.card()
        recorder.leave()
        recorder.link.starter.standing.go_back()
        remove_later_groups(found.census, live.keyed)
        start = self._load(recorder.subject.census(), found)
        recorder.connect(start, predecessor=predecessor, opening_rng=found.session.rng)
        log.info("rewound run=%s step=%d", self.path, recorder.step)
