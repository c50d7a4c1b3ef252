"""What the durable log claims to bring back is what it can."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import ondisk
import pytest
from states import random_states

from everystep.core.census import Atom, Census
from everystep.core.events import Event, Rebase, Seal
from everystep.format.base import Point
from everystep.lane.host import read_facts
from everystep.shadow import logkeeper
from everystep.shadow.logkeeper import LogKeeper
from everystep.store.log import LogWriter
from everystep.store.log_reader import read_log
from everystep.store.runs import Lineage

CENSUS = Census(tuple(Atom(f"atom{i}", "float32", (8,)) for i in range(4)), (), "exact")
RUN_ID = "ab" * 16

RNG = random_states()


class Bench:
    def __init__(self, run: Path) -> None:
        self.run = run
        ondisk.term_dir(run, 1).mkdir(parents=True)
        self.log_keeper = LogKeeper(run, CENSUS, 1)
        self.base = Point(1, 0)
        self.reached = 0

    def log(self, step: int, after: int, *, fits: bool = True, based: tuple[int, ...] = ()) -> None:
        self.offer(step, after, *([Rebase(based, based)] if based else []))
        self.look(fits=fits)

    def offer(self, step: int, after: int, *events: Event) -> None:
        seal = Seal(step, after, RNG, b"", (), 0)
        self.log_keeper.offer(seal, [([*events, seal], memoryview(b""))])

    def look(self, *, fits: bool = True) -> None:
        self.log_keeper.look_after(RUN_ID, 1, self.base, reached=self.reached, fits=fits, now=True)
        deadline = time.monotonic() + 10
        while self.log_keeper.busy and time.monotonic() < deadline:
            time.sleep(0.001)

    def check(self, expected: int) -> None:
        lineage = Lineage(RUN_ID, [], [], ((1, None),))
        found = read_log(self.run, lineage, self.base, CENSUS)
        assert self.log_keeper.reaches(self.base.step) == expected == found.end.step


def test_steps_that_the_trainer_dropped_end_the_log_until_the_next_base(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step in (1, 2):
        bench.log(step, step - 1)
    bench.check(2)
    bench.log(7, 6)
    bench.log(8, 7)
    bench.check(2)
    assert bench.log_keeper.broken
    bench.base = Point(1, 7)
    bench.look()
    bench.check(8)
    assert not bench.log_keeper.broken


def test_a_batch_that_is_written_takes_no_memory(tmp_path: Path) -> None:
    """What is kept beside the bound would double it."""
    bench = Bench(tmp_path)
    bench.log(1, 0)
    bench.check(1)
    assert not bench.log_keeper._batch and not bench.log_keeper._held_bytes


def test_the_state_that_recording_begins_with_is_written_as_a_base_only(tmp_path: Path) -> None:
    """It comes in parts; the last of them comes with the first record that could be replayed."""
    bench = Bench(tmp_path)
    bench.offer(0, 0, Rebase((3,), (0,)))
    assert bench.log_keeper.broken
    bench.look()  # its base is durable
    assert not bench.log_keeper.broken and not ondisk.segments(tmp_path, 1)
    bench.log(1, 0)
    bench.log(2, 1, based=(3,))  # a repair: what is sent anew is part of that step
    bench.check(2)


@pytest.mark.parametrize("fits", [True, False])
def test_a_shadow_that_begins_behind_the_newest_base_claims_no_more(
    tmp_path: Path, fits: bool
) -> None:
    """Another shadow wrote that base; nobody knows whether its log came as far as this one begins."""
    bench = Bench(tmp_path)
    bench.base = Point(1, 2)
    bench.log(5, 5, fits=fits, based=(0, 1, 2, 3))
    for step in (6, 7):
        bench.log(step, step - 1, fits=fits)
    assert bench.log_keeper.broken and bench.log_keeper.reaches(2) == 2
    bench.base = Point(1, 5)
    bench.look()
    bench.check(7)


@pytest.mark.parametrize("reached", [3, 5])
def test_a_shadow_that_takes_over_claims_what_the_log_before_it_reaches(
    tmp_path: Path, reached: int
) -> None:
    """Its replica was handed on at step 5; what the shadow before had still to write is nowhere."""
    bench = Bench(tmp_path)
    bench.base, bench.reached = Point(1, 2), reached
    for step in (6, 7):
        bench.log(step, step - 1)
    assert bench.log_keeper.broken is (reached < 5)
    assert bench.log_keeper.reaches(2) == (7 if reached == 5 else 3)
    bench.base = Point(1, 5)
    bench.look()
    bench.check(7)


def test_behind_a_base_of_another_model_nothing_is_claimed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log(1, 0, fits=False)
    assert bench.log_keeper.broken and bench.log_keeper.reaches(0) == 0
    bench.base = Point(1, 1)
    bench.look()
    bench.log(2, 1)
    bench.check(2)


def test_a_batch_that_fails_late_does_not_hide_a_newer_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.log(1, 0)
    go_on = threading.Event()

    def fail(*_: object) -> int:
        go_on.wait(10)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(LogWriter, "append", fail)
        bench.offer(2, 1)
        bench.log_keeper.look_after(RUN_ID, 1, bench.base, reached=0, fits=True, now=True)
        bench.offer(9, 8)  # the trainer let steps go meanwhile
        go_on.set()
        while bench.log_keeper.busy:
            time.sleep(0.001)
    bench.check(1)
    bench.base = Point(1, 2)  # this base does not reach the newer gap
    bench.log_keeper.trouble = bench.log_keeper.trouble.retry_now()
    bench.look()
    assert bench.log_keeper.broken
    bench.check(2)
    bench.base = Point(1, 8)
    bench.look()
    bench.check(9)


@pytest.mark.parametrize("instant", ["_begin", "_fill"])
def test_any_error_of_the_writer_is_told(
    instant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that cannot be started is no OSError."""
    bench = Bench(tmp_path)
    bench.log(1, 0)

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(LogWriter, instant, fail)
        bench.base = Point(1, 1)  # a new segment
        bench.log(2, 1)
    assert "can't start new thread" in bench.log_keeper.problem and bench.log_keeper.broken
    bench.check(1)
    bench.base = Point(1, 2)
    bench.log_keeper.trouble = bench.log_keeper.trouble.retry_now()
    bench.log(3, 2)
    bench.check(3)
    assert not bench.log_keeper.problem


def test_a_segment_that_somebody_removed_ends_the_log_until_the_next_base(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log(1, 0)
    ondisk.segments(tmp_path, 1)[0].unlink()
    bench.log(2, 1)
    assert "removed" in bench.log_keeper.problem and bench.log_keeper.broken
    bench.base = Point(1, 2)
    bench.log_keeper.trouble = bench.log_keeper.trouble.retry_now()
    bench.log(3, 2)
    bench.check(3)
    assert not bench.log_keeper.problem and not bench.log_keeper.broken


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_a_batch_that_no_thread_takes_is_not_claimed(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    bench.log(1, 0)
    with monkeypatch.context() as broken:

        def refuse(_: threading.Thread) -> None:
            raise error

        bench.offer(2, 1)
        broken.setattr(threading.Thread, "start", refuse)
        bench.look()
    assert bench.log_keeper.broken and bench.log_keeper.dropped == 1
    assert type(error).__name__ in bench.log_keeper.problem
    bench.log_keeper.trouble = bench.log_keeper.trouble.retry_now()
    bench.log(3, 2)
    bench.check(1)
    bench.base = Point(1, 3)
    bench.log(4, 3)
    bench.check(4)
    assert not bench.log_keeper.problem and not bench.log_keeper.broken


def test_what_ends_the_writer_is_told_whatever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(LogWriter, "append", lambda *_: 1 // 0)
        bench.log(1, 0)
    assert "ZeroDivisionError" in bench.log_keeper.problem and bench.log_keeper.broken
    now = time.monotonic_ns()
    assert not bench.log_keeper.spans.meet(now, now + 1)


def test_memory_that_waits_for_a_disk_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on its way counts as well; where there is no place to write to, less is kept."""
    available = read_facts().memory_available_bytes
    assert LogKeeper(tmp_path, CENSUS, 1)._bytes_max <= available // 4
    bench = Bench(tmp_path)
    bench.offer(1, 0)
    size = bench.log_keeper._bytes
    bench.log_keeper._bytes_max = 3 * size
    go_on = threading.Event()

    def hang(*_: object) -> int:
        go_on.wait(10)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(LogWriter, "append", hang)
        bench.log_keeper.look_after(RUN_ID, 1, bench.base, reached=0, fits=True, now=True)
        bench.offer(2, 1)
        bench.offer(3, 2)
        assert not bench.log_keeper.broken
        bench.offer(4, 3)
        assert (
            bench.log_keeper.broken
            and bench.log_keeper.dropped == 3
            and not bench.log_keeper._bytes
        )
        go_on.set()
        while bench.log_keeper.busy:
            time.sleep(0.001)
    bench.base = Point(1, 4)
    bench.log_keeper.trouble = bench.log_keeper.trouble.retry_now()
    bench.log(5, 4)
    bench.check(5)
    monkeypatch.setattr(logkeeper, "_NOWHERE_BYTES_MAX", size)
    bench.log_keeper.nowhere = "the run directory is gone"
    bench.offer(6, 5)
    bench.offer(7, 6)
    assert bench.log_keeper.broken and "gone" in bench.log_keeper.problem


def test_steps_dropped_while_the_log_is_switched_off(tmp_path: Path) -> None:
    """Steps dropped before the first record that is not written are missing, too."""
    bench = Bench(tmp_path)
    for step in (1, 2):
        bench.log(step, step - 1)
    bench.log_keeper.write_in_batches(0, 0)
    bench.log(7, 6)
    bench.log_keeper.write_in_batches(1, 0)
    bench.log(8, 7)
    bench.check(2)
