"""Limits on what is written: pure, with a clock of our own; and as bases and log obey them and tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_base_scheduler import Bench as KeeperBench
from test_logkeeper import CENSUS
from test_logkeeper import Bench as LogBench

from everystep.core.limits import (
    DAY_SECONDS,
    Day,
    Limits,
    Rate,
    Written,
    limits_of,
    log_has_room,
    written_last_day,
)
from everystep.environment import resolve
from everystep.errors import OptionsError
from everystep.format.base import Point
from everystep.option_values import size_bytes
from everystep.options import Options, Tuning
from everystep.shadow import logkeeper
from everystep.shadow.base_scheduler import BaseScheduler
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.logkeeper import LogKeeper
from everystep.shadow.report import describe_store
from everystep.shadow.shipper import Shipper
from everystep.store.disk.meter import Meter
from everystep.store.history import written_lately


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [(0, 0), (17, 17), ("17", 17), ("64k", 64_000), ("200GB", 200 * 10**9), ("1.5 TiB", 3 * 2**39)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert size_bytes("tuning.store_quota", text) == expected
    assert limits_of(Options(tuning=Tuning(store_quota=text))).store_quota == expected


@pytest.mark.parametrize("name", Limits.__struct_fields__)
@pytest.mark.parametrize("bad", [-1, "much", "5 XB", True, None, 1.5])
def test_what_is_no_size_is_refused_by_name(name: str, bad: object) -> None:
    with pytest.raises(OptionsError, match=f"tuning.{name}"):
        Tuning(**{name: bad})


def test_sizes_come_from_the_environment_too() -> None:
    found = limits_of(
        resolve({}, {"EVERYSTEP_STORE_QUOTA": "2MB", "EVERYSTEP_DISK_BYTES_PER_DAY": "9"})
    )
    assert (found.store_quota, found.disk_bytes_per_day) == (2_000_000, 9)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 3)), max_size=40))
def test_a_rate_is_never_exceeded(writes: list[tuple[int, float]]) -> None:
    """Over every window, whatever pauses there were: what ended in it had its time in it."""
    clock = Clock()
    rate = Rate(100, clock)
    ends: list[tuple[float, int]] = []
    for size, idle in writes:
        clock.now += idle
        clock.now += rate.take(size)
        ends.append((clock.now, size))
    for first in range(len(ends)):
        for last in range(first, len(ends)):
            seconds = ends[last][0] - (ends[first][0] - ends[first][1] / 100)
            assert sum(size for _, size in ends[first : last + 1]) <= 100 * seconds + 1e-6


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0, 9000)), max_size=60), st.integers(1, 900)
)
def test_a_day_is_never_exceeded(writes: list[tuple[int, float]], limit: int) -> None:
    clock = Clock()
    day = Day(clock)
    done: list[tuple[float, int]] = []
    for size, idle in writes:
        clock.now += idle
        pause = day.seconds_until(limit, size)
        assert (pause is None) == (size > limit)
        if pause is None:
            continue
        assert 0 <= pause <= DAY_SECONDS + 900
        clock.now += pause
        assert day.seconds_until(limit, size) == 0, "it waited long enough"
        day.add(size)
        done.append((clock.now, size))
        lately = sum(s for when, s in done if when > clock.now - DAY_SECONDS)
        assert lately <= day.written <= limit


def test_what_writers_before_us_wrote_counts() -> None:
    hour = 3600.0
    assert written_last_day([]) == 0
    assert written_last_day([Written(hour, 10 * hour, 100)]) == 100
    assert written_last_day([Written(12 * hour, 24 * hour, 100)]) == 50
    assert written_last_day([Written(25 * hour, hour, 100), Written(None, hour, 100)]) == 0


def test_the_log_leaves_room_for_a_base() -> None:
    def fits(used: int, may_go: int = 0) -> bool:
        return log_has_room(100, used=used, size=10, next_base=30, may_go=may_go)

    assert fits(60) and not fits(61) and fits(61, may_go=1)
    assert fits(90, may_go=30) and not fits(91, may_go=100)
    assert log_has_room(0, used=10**9, size=10, next_base=30, may_go=0)


def limited(bench: KeeperBench, meter: Meter, run: Path) -> None:
    bench.base_writer = BaseWriter(run, None, bench.base_writer._rules, meter=meter)
    bench.base_scheduler = BaseScheduler(Options(durable_every=1), bench.intake, bench.base_writer)
    bench.base_writer.claim()


def persist(bench: KeeperBench, *, asked: bool = False) -> int:
    bench.base_scheduler.persist_if_due(asked=asked, last_words=False, moving=False)
    bench.base_writer.wait()
    durable = bench.base_writer.state.durable
    assert durable is not None, bench.base_writer.state
    return durable.step


def test_a_day_that_is_full_holds_bases_up_and_says_so(tmp_path: Path) -> None:
    clock = Clock()
    bench = KeeperBench(tmp_path / "other")
    meter = Meter(Limits(disk_bytes_per_day=10_000), clock, clock.sleep)
    limited(bench, meter, tmp_path / "run")
    assert persist(bench) == 1, "the first base is not held up"
    meter.remember(10_000)
    bench.call(step=2)
    assert bench.intake.take(may_apply=True)
    assert persist(bench) == 1
    assert (
        "disk_bytes_per_day" in bench.base_scheduler.delayed
        and "durable_every" in bench.base_scheduler.delayed
    )
    assert persist(bench, asked=True) == 2, "who asks gets it"
    assert not bench.base_scheduler.delayed
    bench.call(step=3)
    assert bench.intake.take(may_apply=True)
    assert persist(bench) == 2 and bench.base_scheduler.delayed
    clock.now += DAY_SECONDS + 900
    assert persist(bench) == 3 and not bench.base_scheduler.delayed
    told = describe_store(bench.base_writer, None, Shipper(tmp_path / "run", None, 0))["limits"]
    assert told["disk_bytes_per_day"] == 10_000
    assert (
        0 < told["written_last_day_bytes"] == json.loads(json.dumps(told))["written_last_day_bytes"]
    )
    wrote = written_lately(tmp_path / "run", but=99)
    assert 0 < wrote <= meter.total, "the next writer knows of it"


def test_a_rate_that_is_too_slow_for_the_bases_is_told(tmp_path: Path) -> None:
    clock = Clock()
    bench = KeeperBench(tmp_path / "other")
    meter = Meter(Limits(disk_bytes_per_second=100), clock, clock.sleep)
    limited(bench, meter, tmp_path / "run")
    began = clock.now
    persist(bench)
    assert clock.now - began == pytest.approx(meter.total / 100) and meter.total > 1000
    bench.base_scheduler._begun = (0, 0.0)
    bench.base_scheduler._look_at_rate()
    assert "disk_bytes_per_second (100 B)" in bench.base_scheduler.delayed
    bench.base_writer.meter.hurry = True
    bench.call(step=2)
    assert bench.intake.take(may_apply=True)
    began = clock.now
    assert persist(bench) == 2 and clock.now == began, "last words wait for nothing"


@pytest.mark.parametrize("limits", [Limits(store_quota=12_000), Limits(disk_bytes_per_day=12_000)])
def test_a_log_that_a_limit_ends_names_it_and_goes_on_behind_a_base(
    limits: Limits, tmp_path: Path
) -> None:
    clock = Clock()
    bench = LogBench(tmp_path)
    meter = Meter(limits, clock, clock.sleep)
    bench.log_keeper = LogKeeper(tmp_path, CENSUS, 1, meter)
    bench.log(1, 0)
    bench.log(2, 1)
    option = next(n for n in Limits.__struct_fields__ if getattr(limits, n))
    assert option in bench.log_keeper.problem and bench.log_keeper.broken
    ends = bench.log_keeper.reaches(0)
    bench.check(ends)
    assert ends < 2
    clock.now += DAY_SECONDS + 900
    meter.measure(tmp_path / "nothing here")
    bench.base = Point(1, 2)
    bench.log_keeper.trouble = bench.log_keeper.trouble.retry_now()
    bench.log(3, 2)
    bench.check(3)
    assert not bench.log_keeper.problem


def test_records_that_come_faster_than_the_rate_name_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logkeeper, "_WAITING_BYTES_MAX", 40)
    bench = LogBench(tmp_path)
    bench.log_keeper = LogKeeper(tmp_path, CENSUS, 9, Meter(Limits(disk_bytes_per_second=1)))
    for step in (1, 2, 3):
        bench.offer(step, step - 1)
    assert "disk_bytes_per_second (1 B)" in bench.log_keeper.problem and bench.log_keeper.broken
