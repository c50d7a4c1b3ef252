"""Measures what the tuner needs, and follows its plan where an option says "auto". Main thread only.

Until enough was measured, bases are written as by default and there is no log.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from everystep.core.cadence import seconds_between_bases
from everystep.core.events import Event, Seal
from everystep.core.failures import Mtbf, mean_time_between_failures
from everystep.option_values import AUTO, duration_seconds
from everystep.options import Options
from everystep.process.config import ShadowConfig
from everystep.shadow.base_scheduler import BaseScheduler
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.intake import Intake
from everystep.shadow.logkeeper import LogKeeper
from everystep.shadow.slowdown_estimator import SlowdownEstimator
from everystep.shadow.spans import Spans
from everystep.shadow.threads import start_thread
from everystep.store.disk.probe import Disk, measure_disk
from everystep.store.history import lives_of
from everystep.tune.choose import Choice, choose, worth_changing
from everystep.tune.measured import Measured, machine_of
from everystep.tune.model import Machine, Plan

log = logging.getLogger(__name__)

_REFIT_SECONDS = 10.0
_RETRY_SECONDS = 60.0
_REPLAYED_MIN = 16
_RESTART_SECONDS = 60.0


def first_batch(options: Options) -> int:
    return 0 if options.durable_log == AUTO else int(options.durable_log)


class Tuner:
    def __init__(
        self,
        config: ShadowConfig,
        intake: Intake,
        base_writer: BaseWriter,
        base_scheduler: BaseScheduler,
        logged: LogKeeper | None,
    ) -> None:
        self._config, self._intake, self._base_writer = config, intake, base_writer
        self._base_scheduler, self._log = base_scheduler, logged
        self._cores = len(os.sched_getaffinity(0))
        self._estimator = SlowdownEstimator(self._cores)
        self._base_bytes, self._bytes_before = 0, 0
        self._options = config.options
        self._auto = AUTO in (config.options.durable_every, config.options.durable_log)
        self._disk: Disk | None = None
        self._mtbf: Mtbf | None = None
        self._probe: threading.Thread | None = None
        self._next_fit = 0.0
        self._since, self._since_step, self._changes = 0.0, 0, 0
        self._warmed_up: tuple[int, float] | None = None  # records and seconds of replay by then
        self._choice: Choice | None = None
        self._why = "not enough was measured yet"

    def on_record(self, seal: Seal, entries: list[tuple[list[Event], memoryview]]) -> None:
        state, logged, intake = self._base_writer.state, self._log, self._intake
        if self._warmed_up is None and intake.records >= _REPLAYED_MIN:
            self._warmed_up = intake.records, intake.replay_seconds
        ratio = logged.codec.ratio if logged and logged.batch else 1.0
        self._estimator.record(
            seal.time_ns,
            int(sum(len(payload) for _, payload in entries) / ratio),
            base_spans=self._base_writer.spans,
            log_spans=logged.spans if logged else Spans(),
            base_seconds=state.write_seconds,
            log_seconds=logged.write_seconds if logged else 0.0,
        )

    # ------------------------------------------------------------------ the plan

    def look_after(self) -> None:
        """Choose again if it is time to; called at every turn of the loop."""
        if not self._auto or time.monotonic() < self._next_fit:
            return
        measured = self.measured()
        known = self._warmed_up is not None and self._replayed[0] >= _REPLAYED_MIN
        if not measured.enough or not known:
            return
        if self._disk is None or self._mtbf is None:
            self._begin_probe()
            return
        self._next_fit = time.monotonic() + _REFIT_SECONDS
        machine = machine_of(
            measured,
            sync_seconds=self._disk.sync_seconds,
            write_bytes_per_second=min(
                self._disk.write_bytes_per_second,
                self._base_writer.meter.limits.disk_bytes_per_second or math.inf,
            ),
            mtbf_seconds=self._mtbf.seconds,
            restart_seconds=_RESTART_SECONDS,
        )
        self._follow(machine)

    def _follow(self, machine: Machine) -> None:
        budget = self._options.overhead_budget_percent
        new = choose(
            machine, budget, base_every=self._fixed_interval(machine), batch=self._fixed_batch()
        )
        step, old = self._intake.step, self._choice
        if old is not None and not worth_changing(
            machine,
            budget,
            old.plan,
            new.plan,
            seconds=time.monotonic() - self._since,
            steps=step - self._since_step,
            changes=self._changes,
        ):
            return
        self._changes += old is not None
        self._choice, self._why = new, "; ".join(new.why)
        self._since, self._since_step = time.monotonic(), step
        self._apply(new.plan, machine.iteration_seconds)

    def _apply(self, plan: Plan, iteration_seconds: float) -> None:
        log.info("plan base_every=%d batch=%d why=%s", plan.base_every, plan.batch, self._why)
        if self._options.durable_every == AUTO:
            options = self._base_scheduler.options
            self._base_scheduler.options = msgspec.structs.replace(
                options, durable_every=plan.base_every
            )
        if self._options.durable_log == AUTO and self._log is not None:
            self._log.write_in_batches(plan.batch, 2 * plan.batch * iteration_seconds)

    def _fixed_interval(self, machine: Machine) -> int | None:
        if self._options.durable_every == AUTO:
            return None
        seconds = seconds_between_bases(self._options, machine.iteration_seconds)
        return None if seconds is None else max(1, round(seconds / machine.iteration_seconds))

    def _fixed_batch(self) -> int | None:
        given = self._options.durable_log
        return None if given == AUTO else int(given)

    def _begin_probe(self) -> None:
        """The disk is measured beside the loop: on a bad day it takes a while."""
        if self._probe is None or not self._probe.is_alive():
            self._probe = start_thread("probe", self._measure, self._cannot_measure)

    def _measure(self) -> None:
        run = Path(self._config.run)
        self._mtbf = self._failures(run)
        self._disk = measure_disk(run, self._base_writer.meter)

    def _cannot_measure(self, error: Exception) -> None:
        log.warning("disk_not_measured error=%s", error)
        self._why = f"the disk cannot be measured: {error}"
        self._next_fit = time.monotonic() + _RETRY_SECONDS

    def _failures(self, run: Path) -> Mtbf:
        given = self._options.tuning.mtbf
        if given is not None:
            return Mtbf(duration_seconds("mtbf", given), "as given")
        return mean_time_between_failures(lives_of(run, newest_lives=True))

    # ------------------------------------------------------------------ what is known

    def measured(self) -> Measured:
        state, estimator = self._base_writer.state, self._estimator
        if state.bytes_written != self._bytes_before:
            self._base_bytes = state.bytes_written - self._bytes_before
            self._bytes_before = state.bytes_written
        logged = self._log
        writes = logged.writes if logged else 0
        records, seconds = self._replayed
        return Measured(
            iteration_seconds=estimator.iteration_seconds,
            base_bytes=self._base_bytes,
            base_write_seconds=state.write_seconds / state.bases if state.bases else 0.0,
            base_slowdown=estimator.base_slowdown,
            record_bytes=estimator.record_bytes,
            log_writes=writes,
            log_write_seconds=logged.write_seconds / writes if logged and writes else 0.0,
            log_write_bytes=logged.bytes_written / writes if logged and writes else 0.0,
            log_slowdown=estimator.log_slowdown,
            replay_seconds_per_step=seconds / records if records else 0.0,
            replay_threads=self._config.replay_threads,
            cores=self._cores,
        )

    @property
    def _replayed(self) -> tuple[int, float]:
        """Records and the seconds they took; the first ones load code, and do not count."""
        records, seconds = self._warmed_up or (0, 0.0)
        return self._intake.records - records, self._intake.replay_seconds - seconds

    def describe(self) -> dict[str, Any]:
        """The tuner's part of the status document."""
        return {"measured": dataclasses.asdict(self.measured()), "tuner": self._described_plan()}

    def _described_plan(self) -> dict[str, Any] | None:
        if not self._auto:
            return None
        found = self._choice
        return {
            "plan": dataclasses.asdict(found.plan) if found else None,
            "predicted_overhead_percent": found.waste.overhead_percent if found else None,
            "predicted_waste": found.waste.total if found else None,
            "mtbf_seconds": self._mtbf.seconds if self._mtbf else None,
            "mtbf_why": self._mtbf.why if self._mtbf else "",
            "reason": self._why,
        }
