"""`rewind` while shadows come and go: training goes on from the step that was asked for, and that is what the
next trainer finds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from waiting import wait_until

import everystep
from everystep import resuming
from everystep.errors import UsageError
from everystep.recover.loader import Loader

from .jobs import Job


def _turns(job: Job, run: everystep.Run, count: int) -> None:
    for _ in range(count):
        job.step()
        run.seal()


def _kill_shadow(run: everystep.Run) -> None:
    pid = run.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    recorder = run._recorder
    assert recorder is not None and recorder.link.connection is not None
    wait_until(lambda: not recorder.link.connection.shadow.alive, "the shadow's end")


def test_rewind_while_a_new_shadow_is_starting(tmp_path: Path) -> None:
    job, path = Job("everything"), tmp_path / "run"
    options = {"run": path, "on_lag": "wait", "tuning": everystep.Tuning(idle_exit="20s")}
    run = everystep.attach(job.model, job.optimizer, every=1, state=job.state, **options)
    run.resume()
    _turns(job, run, 3)
    run.flush(60)
    digest = job.digest()
    _turns(job, run, 16)
    run.flush(60)
    _kill_shadow(run)
    _turns(job, run, 2)  # the first notices, the second has a new shadow started
    recorder = run._recorder
    assert recorder is not None and recorder.link.starter.busy
    assert run.rewind(3) == 3
    assert job.digest() == digest
    time.sleep(2)  # one that was just starting would have claimed the run by now
    _turns(job, run, 4)
    assert run.flush(30) == 7
    digest, status = job.digest(), run.status()
    assert (status["health"], status["durable_step"]) == ("ok", 7), status
    os.kill(status["pid"], signal.SIGKILL)  # the host goes down: only the store is left

    fresh = Job("everything")
    with everystep.attach(
        fresh.model, fresh.optimizer, every=1, state=fresh.state, **options
    ) as later:
        assert (later.step, fresh.digest()) == (7, digest)


def test_a_rewind_that_does_not_fit_gives_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, path = Job("adam"), tmp_path / "run"
    run = everystep.attach(job.model, job.optimizer, state=job.state, run=path, every=1)
    run.resume()
    _turns(job, run, 2)
    run.flush(60)
    _turns(job, run, 2)
    run.flush(60)
    digest, shadow = job.digest(), run.status()["pid"]

    def refuse(*_: object) -> None:
        raise UsageError("another kind of random states")

    with monkeypatch.context() as patch:
        patch.setattr(resuming, "check_rng", refuse)
        with pytest.raises(UsageError, match="another kind"):
            run.rewind(2)
    assert (run.step, job.digest(), run.status()["pid"]) == (4, digest, shadow)
    _turns(job, run, 1)
    assert run.flush(60) == 5

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "_load_optimizers", refuse)  # half of it is loaded then
        with pytest.raises(UsageError, match="another kind"):
            run.rewind(2)
    job.step()
    with pytest.raises(UsageError, match="nobody knows the state"):
        run.seal()
    assert run.rewind(2) == 2
    _turns(job, run, 2)
    assert (run.flush(60), job.digest()) == (4, digest)
    run.close()


def test_rewind_right_after_its_shadow_has_died(tmp_path: Path) -> None:
    """Nobody has noticed yet, and nobody waits for it."""
    job = Job("adam")
    run = everystep.attach(job.model, job.optimizer, state=job.state, run=tmp_path / "run", every=1)
    run.resume()
    _turns(job, run, 2)
    run.flush(60)
    digest = job.digest()
    _turns(job, run, 2)
    _kill_shadow(run)
    assert (run.rewind(2), job.digest()) == (2, digest)
    _turns(job, run, 1)
    assert run.flush(60) == 3
    run.close()
