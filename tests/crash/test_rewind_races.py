"""`rewind` while shadows come and go: training goes on from the step that was asked for, and that is what the
next trainer finds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import everystep

from .jobs import Job
from .processes import wait_until


def _turns(job: Job, run: everystep.Run, count: int) -> None:
    for _ in range(count):
        job.step()
        run.seal()


def _kill_shadow(run: everystep.Run) -> None:
    pid = run.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    recorder = run._recorder
    assert recorder is not None and recorder.connection is not None
    wait_until(lambda: not recorder.connection.shadow.alive, "the shadow's end")


def test_rewind_while_a_new_shadow_is_starting(tmp_path: Path) -> None:
    job, path = Job("everything"), tmp_path / "run"
    options = {"run": path, "on_lag": "wait", "idle_exit": "20s"}
    run = everystep.attach(job.model, job.optimizer, state=job.state, **options)
    run.resume()
    _turns(job, run, 3)
    run.flush(60)
    digest = job.digest()
    _turns(job, run, 16)
    run.flush(60)
    _kill_shadow(run)
    _turns(job, run, 2)  # the first notices, the second has a new shadow started
    recorder = run._recorder
    assert recorder is not None and recorder.starter.busy
    assert run.rewind(3) == 3
    assert job.digest() == digest
    time.sleep(2)  # one that was just starting would have claimed the run by now
    _turns(job, run, 4)
    assert run.flush(30) == 7
    digest, status = job.digest(), run.status()
    assert (status["health"], status["durable_step"]) == ("ok", 7), status
    os.kill(status["pid"], signal.SIGKILL)  # the host goes down: only the store is left

    fresh = Job("everything")
    with everystep.attach(fresh.model, fresh.optimizer, state=fresh.state, **options) as later:
        assert (later.step, fresh.digest()) == (7, digest)
