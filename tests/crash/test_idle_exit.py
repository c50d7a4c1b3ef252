"""A shadow without a trainer: it makes everything durable, goes away, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

import everystep

from .jobs import Job, read_journal
from .nursery import Nursery
from .processes import alive, holders_of, inodes_of, shadows, sockets


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def restored(run: Path, name: str = "adamw") -> tuple[int, str]:
    job = Job(name)
    return everystep.restore(run, job.model, job.optimizer), job.digest()


def check_nothing_left(runtime: Path, pid: int, inodes: set[int]) -> None:
    assert inodes, "the shadow held no shared memory"
    wait_until(lambda: not alive(pid), f"shadow {pid} to go away")
    assert shadows(runtime) == []
    assert sockets(runtime) == []
    assert holders_of(inodes) == [], "shared memory is still held"
    assert not list(runtime.rglob("shadow.json")), "the card is still there"


def test_killed_trainer_then_idle_exit(nursery: Nursery, runtime: Path, tmp_path: Path) -> None:
    run, journal = tmp_path / "run", tmp_path / "journal"
    options = {
        "run": run,
        "tuning": everystep.Tuning(idle_exit="1s"),
        "on_lag": "wait",
        "durable_every": "1h",
    }
    trainer = nursery.start("adamw", 10**6, journal, **options)
    wait_until(lambda: len(read_journal(journal)) > 40, "forty steps")
    (pid,) = shadows(runtime)
    inodes = inodes_of(pid)
    os.kill(trainer, signal.SIGKILL)
    assert nursery.wait(trainer) == -signal.SIGKILL
    check_nothing_left(runtime, pid, inodes)
    steps = {e["step"]: e["digest"] for e in read_journal(journal) if e["kind"] == "step"}
    step, digest = restored(run)
    assert max(steps) - step <= 1, f"{max(steps)} finished, {step} durable"
    assert digest == steps[step]


def test_sigterm_writes_a_base(runtime: Path, tmp_path: Path) -> None:
    """Everything sealed before the signal is in that base, also what still waited in the ring."""
    job = Job("adamw")
    options = {"run": tmp_path / "run", "state": job.state, "every": 1, "durable_every": "1h"}
    with everystep.attach(job.model, job.optimizer, **options, on_lag="wait") as run:
        for _ in run.steps(3):
            job.step()
        wait_until(lambda: run.status()["warm"], "a warm shadow")
        (pid,) = shadows(runtime)
        inodes = inodes_of(pid) - inodes_of(os.getpid())  # the ring is ours too
        os.kill(pid, signal.SIGSTOP)
        for _ in run.steps(103):
            job.step()
        expected = (103, job.digest())
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
        check_nothing_left(runtime, pid, inodes)
        assert restored(run.path) == expected


def test_sigterm_while_the_shadow_starts(runtime: Path, tmp_path: Path) -> None:
    """Torch is still being imported there, and the trainer is told to end as well: nothing is lost."""
    job = Job("adamw")
    options = {"run": tmp_path / "run", "state": job.state, "every": 1, "durable_every": "1h"}
    with everystep.attach(job.model, job.optimizer, **options) as run:
        for _ in run.steps(5):
            job.step()
        (pid,) = shadows(runtime)
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not alive(pid), "the shadow to go away")
        assert restored(run.path) == (5, job.digest())


def test_closed_run_leaves_nothing(runtime: Path, tmp_path: Path) -> None:
    job = Job("adamw")
    others = inodes_of(os.getpid())  # of tests before this one
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state
    ) as run:
        for _ in run.steps(4):
            job.step()
        (pid,) = shadows(runtime)
        inodes = inodes_of(pid)
    check_nothing_left(runtime, pid, inodes - inodes_of(os.getpid()))
    assert inodes_of(os.getpid()) <= others, "the trainer still holds descriptors"
    assert restored(tmp_path / "run") == (4, job.digest())


def test_shadow_of_a_failed_loop_serves_until_idle(runtime: Path, tmp_path: Path) -> None:
    """An exception in the loop is like a crash: the shadow stays for a while, then goes."""
    job = Job("adamw")
    options = {
        "run": tmp_path / "run",
        "state": job.state,
        "every": 1,
        "tuning": everystep.Tuning(idle_exit="2s"),
    }
    with (
        pytest.raises(RuntimeError, match="boom"),
        everystep.attach(job.model, job.optimizer, **options) as run,
    ):
        for step in run.steps(10):
            if step == 6:
                raise RuntimeError("boom")
            job.step()
            done = job.digest()
    (pid,) = shadows(runtime)
    inodes = inodes_of(pid)
    assert restored(tmp_path / "run") == (6, done)
    began = time.monotonic()
    check_nothing_left(runtime, pid, inodes - inodes_of(os.getpid()))
    print(f"gone after {time.monotonic() - began:.1f} s")
    assert restored(tmp_path / "run") == (6, done)


FAILING = """
import os
from everystep.errors import StoreError
from everystep.shadow import process
from everystep.store import term
right, keep_cadence = term.write_base, process.Shadow._keep_cadence

def write_base(*args):
    if os.path.exists({file!r}):
        raise StoreError("the disk is away")
    return right(*args)

def failing(self):
    keep_cadence(self)
    if os.path.exists({file!r}):
        raise ValueError("a fault of ours")

term.write_base, process.Shadow._keep_cadence = write_base, failing
"""


def test_what_only_a_shadow_holds_is_kept_until_it_is_written(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer lets records go by plan, and dies; the write before that fails, and so does the loop."""
    away = tmp_path / "away"
    away.touch()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAILING.format(file=str(away)))
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    nursery, run, journal = Nursery(), tmp_path / "run", tmp_path / "journal"
    try:
        options = {
            "run": run,
            "tuning": everystep.Tuning(idle_exit="2s"),
            "on_lag": "wait",
            "every": "1h",
        }
        trainer = nursery.start("adamw", 10**6, journal, **options)
        wait_until(lambda: len(read_journal(journal)) > 40, "forty steps")
        (pid,) = shadows(runtime)

        def log_says(words: str) -> bool:
            return any(words in p.read_text() for p in runtime.rglob("shadow.log"))

        wait_until(lambda: log_says("the disk is away"), "a write that fails")
        wait_until(lambda: log_says("a fault of ours"), "a loop that fails")
        os.kill(trainer, signal.SIGKILL)
        assert nursery.wait(trainer) == -signal.SIGKILL
        time.sleep(1)
        assert alive(pid), "it holds what is nowhere else"
        away.unlink()
        wait_until(lambda: not alive(pid), f"shadow {pid} to go away")
    finally:
        nursery.close()
    assert restored(run) == (0, Job("adamw").digest())
