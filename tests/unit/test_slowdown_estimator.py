"""What the shadow measures of training from the times of its seals, and what it makes of a run's history."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import ondisk
import pytest

from everystep.core.failures import USUAL_SECONDS, Life, mean_time_between_failures
from everystep.core.retention import Rules
from everystep.shadow.slowdown_estimator import SlowdownEstimator
from everystep.shadow.spans import Spans
from everystep.store.history import lives_of
from everystep.store.term import TermWriter
from everystep.tune.measured import Measured, machine_of

STEP, CORES = 0.1, 4


class Written(Spans):
    """One span, or none."""

    def __init__(self, begin: float, end: float, any_of_it: bool) -> None:
        super().__init__()
        if any_of_it:
            self._spans.append((int(begin * 1e9) + 1, int(end * 1e9) - 1))


class Scene:
    """A training whose steps take longer while something is written."""

    def __init__(self) -> None:
        self.estimator = SlowdownEstimator(CORES)
        self.clock = 1.0
        self.base_seconds = self.log_seconds = 0.0

    def step(self, seconds: float = STEP, *, basing: bool = False, logging: bool = False) -> None:
        begin, self.clock = self.clock, self.clock + seconds
        self.estimator.record(
            int(self.clock * 1e9),
            1000,
            base_spans=Written(begin, self.clock, basing),
            log_spans=Written(begin, self.clock, logging),
            base_seconds=self.base_seconds,
            log_seconds=self.log_seconds,
        )

    def base(self, steps: int, seconds: float, write_seconds: float) -> None:
        for _ in range(steps):
            self.step(seconds, basing=True)
        self.base_seconds += write_seconds
        self.step()

    def write(self, seconds: float, write_seconds: float) -> None:
        self.log_seconds += write_seconds
        self.step(seconds, logging=True)


def test_nothing_is_claimed_before_enough_was_seen() -> None:
    scene = Scene()
    scene.step()
    assert scene.estimator.iteration_seconds == 0
    assert scene.estimator.base_slowdown == scene.estimator.log_slowdown == 1 / CORES


def test_what_training_loses_to_writing_is_found() -> None:
    scene = Scene()
    for _ in range(100):
        for _ in range(10):
            scene.step()
        scene.base(5, seconds=1.5 * STEP, write_seconds=5 * STEP)  # half a step each: half of it
        scene.write(STEP + 0.002, write_seconds=0.020)
    estimator = scene.estimator
    assert estimator.iteration_seconds == pytest.approx(STEP, rel=0.01)
    assert estimator.base_slowdown == pytest.approx(0.5, rel=0.05)
    assert estimator.log_slowdown == pytest.approx(0.1, rel=0.25)
    assert estimator.record_bytes == 1000


def test_writing_that_slows_nothing_down_costs_nothing_in_the_long_run() -> None:
    scene = Scene()
    for _ in range(200):
        for _ in range(5):
            scene.step()
        scene.base(5, seconds=STEP, write_seconds=5 * STEP)
    assert scene.estimator.base_slowdown < 0.05 / CORES


def test_a_steady_machine_is_believed_soon_and_a_noisy_one_later() -> None:
    """Each base takes half of training's time: a dozen steady ones tell, noisy ones might be chance."""
    found = []
    for noise in (0.0, 3.0):
        scene, chance = Scene(), random.Random(0)
        for _ in range(12):
            for _ in range(20):
                scene.step()
            share = 0.5 + noise * chance.uniform(-1, 1)
            scene.base(5, seconds=(1 + share) * STEP, write_seconds=5 * STEP)
        found.append(scene.estimator)
    steady, noisy = (estimator.base_slowdown for estimator in found)
    assert steady == pytest.approx(0.5, rel=0.05)
    seen = found[1]._basing.lost / found[1]._basing.write_seconds
    assert abs(noisy - 1 / CORES) < 0.8 * abs(seen - 1 / CORES), "it leans on the prior"


def test_one_base_that_happened_to_be_noisy_is_not_believed() -> None:
    for lost in (-0.04, 0.4):
        scene = Scene()
        for _ in range(20):
            scene.step()
        scene.step(STEP + lost, basing=True)
        scene.base_seconds = 0.05
        for _ in range(10):
            scene.step()
        assert 0.25 / CORES < scene.estimator.base_slowdown < 2 / CORES


def test_what_was_seen_long_ago_stays_known() -> None:
    scene = Scene()
    for _ in range(20):
        for _ in range(20):
            scene.step()
        scene.write(STEP + 0.002, write_seconds=0.020)
    for _ in range(20):
        scene.step()
    before = scene.estimator.log_slowdown
    for _ in range(100_000):
        scene.step()
    assert scene.estimator.log_slowdown == before == pytest.approx(0.1, rel=0.3)


def test_writing_that_never_ends_is_compared_with_what_was_near() -> None:
    """The machine becomes slower while the log is written at every step: that is not the log's doing."""
    scene = Scene()
    for _ in range(50):
        scene.step()
    for number in range(5000):
        scene.write(STEP if number < 1000 else 3 * STEP, write_seconds=0.02)
    for _ in range(20):
        scene.step(3 * STEP)
    assert scene.estimator.log_slowdown <= 1 / CORES


def test_a_machine_that_is_busy_at_times_is_not_taken_for_a_cost_of_writing() -> None:
    """Others come and go for hundreds of steps: only the steps around a write are compared."""
    scene = Scene()
    for load in (1.0, 3.0, 1.0, 4.0) * 5:
        for _ in range(10):
            for _ in range(20):
                scene.step(load * STEP)
            for _ in range(2):
                scene.step(load * STEP + 0.01, basing=True)
            scene.base_seconds += 0.1
            scene.step(load * STEP)
    assert scene.estimator.base_slowdown == pytest.approx(0.2, rel=0.15)


def test_a_pause_is_no_step() -> None:
    scene = Scene()
    for _ in range(50):
        scene.step()
    scene.step(1000.0)
    assert scene.estimator.iteration_seconds == pytest.approx(STEP)


def test_the_pace_of_now_counts_more_than_the_one_of_long_ago() -> None:
    scene = Scene()
    for _ in range(5000):
        scene.step(STEP)
    for _ in range(20000):
        scene.step(3 * STEP)
    assert scene.estimator.iteration_seconds == pytest.approx(3 * STEP, rel=0.05)


def test_failures_are_counted_and_a_short_history_says_little() -> None:
    hour = 3600.0
    assert mean_time_between_failures([]).seconds == USUAL_SECONDS
    assert mean_time_between_failures([Life(hour, False)]).seconds == USUAL_SECONDS
    often = mean_time_between_failures([Life(hour, True)] * 500)
    assert often.seconds == pytest.approx(hour, rel=0.1) and "500 failures" in often.why
    once = mean_time_between_failures([Life(hour, True)])
    assert hour < once.seconds < USUAL_SECONDS
    assert mean_time_between_failures([Life(1e6, False)]).seconds > 1e6


def test_the_log_itself_says_more_about_a_sync_than_a_probe_does() -> None:
    few = Measured(0.1, 10**9, 1.0, record_bytes=1e6, log_writes=1, log_write_seconds=0.05)
    many = Measured(
        *(0.1, 10**9, 1.0),
        record_bytes=1e6,
        log_writes=100,
        log_write_seconds=0.05,
        log_write_bytes=3e7,
    )
    disk = {"sync_seconds": 0.001, "write_bytes_per_second": 1e9}
    machines = [machine_of(m, **disk, mtbf_seconds=1e5, restart_seconds=1) for m in (few, many)]
    assert [m.log_sync_seconds for m in machines] == pytest.approx([0.001, 0.02])
    assert machines[0].replay_seconds_per_step > few.iteration_seconds, (
        "no replay here: train again"
    )


def test_a_span_is_met_while_it_lasts_and_no_longer() -> None:
    spans = Spans()
    spans.begin()
    begun = time.monotonic_ns()
    assert spans.meet(begun, begun + 1) and spans.meet(begun + 10**9, begun + 2 * 10**9)
    assert not spans.meet(0, 1)
    spans.end()
    ended = time.monotonic_ns()
    assert spans.meet(begun, ended) and not spans.meet(ended + 1, ended + 10**9)


def test_a_machine_that_becomes_slower_is_not_the_writers_doing() -> None:
    scene = Scene()
    for number in range(600):
        pace = STEP * (1 + 0.01 * number)
        if number % 20 == 19:
            scene.base_seconds += pace
        scene.step(pace, basing=number % 20 == 19)
    assert scene.estimator.base_slowdown < 1 / CORES * 2 / 30 + 0.005  # the prior alone


def test_the_last_few_spans_are_told_once_they_are_over() -> None:
    spans = Spans()
    assert spans.ended == []
    for _ in range(12):
        spans.begin()
        spans.end()
    spans.begin()
    told = spans.ended
    assert len(told) == 8 and told == sorted(told)
    assert all(begin <= end <= time.monotonic() for begin, end in told)


def test_a_life_is_as_long_as_its_writer_measured_whatever_the_clock_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = time.time
    for jump in (-1e6, 1e6):
        writer = TermWriter(tmp_path, None, Rules())
        monkeypatch.setattr(time, "time", lambda jump=jump: wall() + jump)
        writer.close()
        monkeypatch.setattr(time, "time", wall)
    lives = lives_of(tmp_path, newest_lives=False)
    assert [life.failed for life in lives] == [False, False]
    assert all(0 < life.seconds < 60 for life in lives)
    segment = ondisk.log_dir(tmp_path, 2) / ondisk.segment_name(1, 0)
    segment.parent.mkdir(parents=True)
    segment.touch()
    os.utime(segment, (wall() + 1e9, wall() + 1e9))
    assert lives_of(tmp_path, newest_lives=False)[1].seconds < 2 * USUAL_SECONDS


def test_spans_go_by_a_clock_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    spans = Spans()
    before = time.monotonic_ns()
    spans.begin()
    spans.end()
    assert spans.meet(before, time.monotonic_ns() + 1)
