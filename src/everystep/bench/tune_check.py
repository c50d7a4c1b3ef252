"""`everystep bench tune`: the overhead that the tuner predicts for its plan, against the measured one.

First bases are written much too often, then the log: that shows what each costs. Then the plan is chosen and
followed, in windows each of which lies beside one of recording without writing. What it costs is told twice:
by these windows, and by the steps beside each base. Of a plan without a log the second counts: two runs that
do the same may differ by more than bases cost.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import everystep
from everystep.bench.clock import timed
from everystep.bench.gpt import Training
from everystep.bench.place import temporary_place
from everystep.bench.slowdown import MeasuredSlowdown, measured_slowdown, seconds_lost
from everystep.environment import resolve
from everystep.errors import EverystepError
from everystep.session import Run
from everystep.store.disk.probe import Disk, measure_disk
from everystep.tune.choose import Choice, choose
from everystep.tune.measured import Measured, machine_of

_PATIENCE_SECONDS = 300.0  # for each base
_LOOK_SECONDS = (0.2, 0.6)
_WRITES, _WRITES_MIN = 4, 8  # of the log, for each base: they are shorter
_LOG_BYTES_MAX = 8 << 30  # unless so few writes say nothing
_BASE_EVERY_MIN = 12
_QUIET_STEPS = 16  # between bases: as many as what is lost to one is compared with
_TIMED_STEPS = 10
_BASES_REPLACING = 2  # they take longest: each is read back, and an old one removed
_BATCH = 4
_LOG = {"durable_every": "1h", "durable_log": _BATCH}
_RARELY = {"durable_every": "1h", "durable_log": 0}
_GOAL_RELATIVE, _GOAL_POINTS = 0.3, 0.2


class Settings(NamedTuple):
    model: str
    batch: int
    optimizer: str
    steps: int
    rounds: int
    bases: int  # written first, so that the shadow knows what they cost
    mtbf_seconds: float
    budget_percent: float
    folder: Path | None


def tune_check(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Predicted and measured, and how far apart windows of the same kind lie."""
    training = Training(settings.model, settings.batch, settings.optimizer, compiled=False)
    with temporary_place(settings.folder) as place:
        bench = _Bench(training, place, settings.steps)
        disk = measure_disk(place)
        say(f"disk: {disk.write_bytes_per_second / 1e9:.2f} GB/s")
        measured = bench.measured(settings.bases, disk)
        choice = _choose(measured, disk, settings)
        plan = {"durable_every": choice.plan.base_every, "durable_log": choice.plan.batch}
        say(f"plan: {plan}, predicted {choice.waste.overhead_percent:.3f} %")
        windows: dict[str, list[_Window]] = {"none": [], "recording": [], "plan": []}
        kinds = [("none", None), ("recording", _RARELY), ("plan", plan)]
        for number in range(settings.rounds):
            for name, options in reversed(kinds) if number % 2 else kinds:
                windows[name].append(bench.window(name, options))
                say(f"{name:>10}: {windows[name][-1].brief}")
    return _document(settings, training.device.type, choice, measured, windows)


class _Window(NamedTuple):
    seconds: list[float]
    lost: list[float]  # seconds, to each base that was written meanwhile

    @property
    def mean(self) -> float:
        return statistics.mean(self.seconds)

    @property
    def brief(self) -> str:
        lost = f"; {1e3 * sum(self.lost):.1f} ms in all were lost to {len(self.lost)} bases"
        return f"{1e3 * self.mean:.2f} ms a step{lost if self.lost else ''}"


def _choose(measured: Measured, disk: Disk, settings: Settings) -> Choice:
    machine = machine_of(
        measured,
        sync_seconds=disk.sync_seconds,
        write_bytes_per_second=disk.write_bytes_per_second,
        mtbf_seconds=settings.mtbf_seconds,
        restart_seconds=0.0,
    )
    return choose(machine, settings.budget_percent)


class _Bench:
    def __init__(self, training: Training, place: Path, steps: int) -> None:
        self._training, self._place, self._steps = training, place, steps
        self._runs = 0
        self._spans: set[tuple[float, float]] = set()  # when each base was written
        self._look_at = 0.0
        self._chance = random.Random(0)
        for _ in range(3):
            training.step()

    def measured(self, count: int, disk: Disk) -> Measured:
        """What the shadow sees while bases are written too often, then the log, if the disk can follow."""
        every = self._base_every()
        with self._attached("bases", {"durable_every": every, "durable_log": 0}) as run:
            first = run.status()["based_step"] or 0
            self._until(
                run,
                lambda s: (
                    (s["based_step"] or 0) >= first + count * every
                    and Measured(**s["measured"]).enough
                ),
                count,
            )
            bases = Measured(**run.status()["measured"])
        if bases.record_bytes > disk.write_bytes_per_second * bases.iteration_seconds:
            return bases
        fit = int(_LOG_BYTES_MAX // (_BATCH * bases.record_bytes))
        writes = max(_WRITES_MIN, min(_WRITES * count, fit))
        with self._attached("log", _LOG) as run:
            self._until(run, lambda s: s["measured"]["log_writes"] >= writes)
            log = run.status()["measured"]
        return dataclasses.replace(bases, **{k: v for k, v in log.items() if k.startswith("log_")})

    def _base_every(self) -> int:
        """Steps from one base to the next, with enough of them in between that nothing is written beside."""
        step = statistics.mean(self._timed(None, _TIMED_STEPS))
        self._spans = set()
        with self._attached("first", {"durable_every": _BASE_EVERY_MIN, "durable_log": 0}) as run:
            bases = resolve({}).keep.last + _BASES_REPLACING
            self._until(run, lambda _: len(self._spans) >= bases, bases)
        longest = max(end - begin for begin, end in self._spans)
        return max(_BASE_EVERY_MIN, math.ceil(longest / step) + _QUIET_STEPS)

    def window(self, name: str, options: dict[str, Any] | None) -> _Window:
        """A run of its own, once it does what it does in the long run. Windows are short: garbage of before
        must not be collected in one of them."""
        if options is None:
            gc.collect()
            return _Window(self._timed(None, self._steps), [])
        with self._attached(name, options) as run:
            self._spans = set()
            gc.collect()
            seconds = self._timed(run, self._steps)
            ended = time.monotonic()
            self._look(run)
            return _Window(seconds, seconds_lost(seconds, ended, sorted(self._spans)))

    @contextmanager
    def _attached(self, name: str, options: dict[str, Any]) -> Iterator[Run]:
        self._runs += 1
        model, optimizer = self._training.model, self._training.optimizer
        path = self._place / f"run-{self._runs}-{name}"
        with everystep.attach(
            model, optimizer, run=path, every=1, on_failure="raise", **options
        ) as run:
            run.resume()
            self._until(run, lambda s: s["warm"] and s["durable_step"] is not None)
            yield run
        shutil.rmtree(path, ignore_errors=True)  # all of them together would fill a small disk

    def _until(self, run: Run, reached: Callable[[dict[str, Any]], bool], bases: int = 1) -> None:
        patience = bases * _PATIENCE_SECONDS
        deadline = time.monotonic() + patience
        while not (self._turn(run) and reached(run.status())):
            if time.monotonic() > deadline:
                raise EverystepError(
                    f"bench tune: not ready to measure within {patience:.0f} s",
                    hint="a smaller --model or --batch makes steps shorter",
                )

    def _timed(self, run: Run | None, steps: int) -> list[float]:
        cuda = self._training.device.type == "cuda"
        return timed(cuda, lambda: self._turn(run), lambda count: count < steps)

    def _turn(self, run: Run | None) -> bool:
        """A step. Now and then, never in step with bases, the shadow is asked what it wrote: True."""
        self._training.step()
        if run is None:
            return False
        run.seal()
        if time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + self._chance.uniform(*_LOOK_SECONDS)
        self._look(run)
        return True

    def _look(self, run: Run) -> None:
        self._spans |= {tuple(span) for span in run.status().get("written_between", ())}


def _by_windows(windows: dict[str, list[_Window]]) -> MeasuredSlowdown:
    """Each window against the one of its round: right before it, or right behind."""
    pairs = zip(windows["plan"], windows["recording"], strict=True)
    found = [100 * (plan.mean / recording.mean - 1) for plan, recording in pairs]
    error = statistics.stdev(found) / math.sqrt(len(found)) if found[1:] else math.inf
    return MeasuredSlowdown(statistics.mean(found), error)


def _told(found: MeasuredSlowdown) -> dict[str, float | None]:
    known = math.isfinite(found.standard_error)
    return {**found._asdict(), "standard_error": found.standard_error if known else None}


def _document(
    settings: Settings,
    device: str,
    choice: Choice,
    measured: Measured,
    windows: dict[str, list[_Window]],
) -> dict[str, Any]:
    mean = {name: statistics.mean(w.mean for w in found) for name, found in windows.items()}
    none = [window.mean for window in windows["none"]]
    by_windows = _by_windows(windows)
    lost = [seconds for window in windows["plan"] for seconds in window.lost]
    beside = measured_slowdown(lost, sum(sum(window.seconds) for window in windows["plan"]))
    predicted = choice.waste.overhead_percent
    # a log is beside every step
    overhead = by_windows if choice.plan.batch or not lost[1:] else beside
    apart = abs(predicted - overhead.percent)
    return {
        "model": settings.model,
        "device": device,
        "steps": settings.steps * settings.rounds,
        "plan": dataclasses.asdict(choice.plan),
        "why": list(choice.why),
        "predicted_overhead_percent": predicted,
        "measured_by_windows": _told(by_windows),
        "measured_beside_bases": {**_told(beside), "bases": len(lost)},
        "measured_overhead_percent": overhead.percent,
        "within_goal": apart <= max(_GOAL_POINTS, _GOAL_RELATIVE * abs(overhead.percent)),
        "none_spread": (max(none) - min(none)) / mean["none"],
        "recording_overhead_percent": 100 * (mean["recording"] / mean["none"] - 1),
        "seconds_per_step": mean,
        "slowest_seconds": {
            name: max(max(w.seconds) for w in found) for name, found in windows.items()
        },
        "measured": dataclasses.asdict(measured),
    }
