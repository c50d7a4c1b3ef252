"""A worker that fails in whatever way: that is told and tried again after a pause, unless it is fenced."""

from __future__ import annotations

import threading
import time

import pytest

from everystep.core.cadence import retry_seconds
from everystep.core.trouble import Trouble
from everystep.errors import Fenced, StoreError
from everystep.shadow.worker import Worker


def test_trouble_grows_is_over_and_begins_anew() -> None:
    trouble = Trouble().after("no", 10.0).after("still no", 20.0)
    assert trouble == Trouble("still no", "still no", 2, 2, 20.0 + retry_seconds(2))
    assert trouble.pause_seconds == retry_seconds(2) > retry_seconds(1)
    over = trouble.over()
    assert not over.problem and not over.failures and not over.pause_seconds
    assert over.last == "still no" and over.failures_total == 2
    assert over.after("again", 30.0).retry_at == 30.0 + retry_seconds(1)


def test_what_has_changed_may_mend_it() -> None:
    trouble = Trouble().after("no room", 10.0).retry_now()
    assert trouble.problem == "no room" and trouble.retry_at == 0 and trouble.failures_total == 1


def test_who_is_fenced_stays_fenced() -> None:
    trouble = Trouble().after("others", 0.0, fenced=True).after("the disk is away", 1.0)
    assert trouble.fenced and trouble.over().fenced and trouble.retry_now().fenced


@pytest.mark.parametrize("error", [StoreError("no"), ValueError("a fault of ours"), MemoryError()])
def test_a_failure_is_told_and_the_next_try_heals(error: Exception) -> None:
    worker, errors, ends = Worker("w"), [error], []

    def work() -> None:
        if errors:
            raise errors.pop()

    worker.begin(work, then=lambda: ends.append(worker.trouble))
    worker.wait(10)
    told = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
    assert worker.trouble.problem == told and ends == [worker.trouble]
    assert worker.idle and not worker.may_begin, "not in a hot loop"
    worker.do(work)
    assert not worker.trouble.problem and worker.trouble.last == told


def test_what_is_fenced_is_not_tried_again() -> None:
    worker, turns = Worker("w"), []

    def work() -> None:
        turns.append(1)
        raise Fenced("others have gone on")

    worker.repeat(work, 0.001)
    worker.wait(10)
    assert len(turns) == 1 and not worker.busy and not worker.may_begin and not worker.idle


def test_what_is_repeated_goes_on_behind_a_failure_until_it_is_stopped() -> None:
    worker, turns, seen = Worker("w"), [], threading.Event()

    def work() -> None:
        turns.append(1)
        if len(turns) == 1:
            raise OSError(5, "Input/output error")
        if len(turns) > 3:
            seen.set()

    began = time.monotonic()
    worker.repeat(work, 0.001)
    assert seen.wait(30) and time.monotonic() - began >= retry_seconds(1)
    worker.stop()
    worker.wait(10)
    assert not worker.busy and worker.trouble.failures_total == 1 and not worker.trouble.failures


def test_no_thread_to_be_had_is_a_failure_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done, ends = Worker("w"), threading.Event(), []
    with monkeypatch.context() as patched:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        worker.begin(done.set, then=lambda: ends.append(1))
    assert "can't start new thread" in worker.trouble.problem and ends == [1] and not worker.busy
    worker.begin(done.set)
    assert done.wait(10)
