"""A trainer killed while it takes over from the shadow before, and the next one right on its heels.

Two shadows then hold the same memory for a moment. One of them must win: nothing is lost, no base is
written from memory that the other one changes, and nobody is shut out of the store.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

import everystep
from everystep.lane.runtime import runtime_dir
from everystep.recover.find import find_newest
from everystep.recover.point import RestorePoint

from .jobs import Job, read_journal
from .nursery import Nursery
from .processes import shadows
from .test_trainer_kills import assert_same, check_losses

SEED = int(os.environ.get("EVERYSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
FIRST_STEPS = 30


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def first_life(nursery: Nursery, journal: Path, run: Path) -> None:
    pid = nursery.start("adamw", 10**6, journal, run=run, on_lag="wait", durable_every="1h")
    wait_until(lambda: len(read_journal(journal)) > FIRST_STEPS, f"{FIRST_STEPS} steps")
    os.kill(pid, signal.SIGKILL)
    assert nursery.wait(pid) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("instant", "pause_seconds"),
    [("shadow starting", 0.0), ("shadow started", 0.0), ("shadow started", 0.15)],
)
def test_next_trainer_right_behind_one_that_died_in_attach(
    instant: str, pause_seconds: float, nursery: Nursery, runtime: Path, tmp_path: Path
) -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    run, journal, reference = tmp_path / "run", tmp_path / "journal", tmp_path / "reference"
    first_life(nursery, journal, run)
    order = {"job": "adamw", "journal": journal, "run": run, "on_lag": "wait"}
    code = nursery.wait(nursery.start(**order, total=10**6, instant=[instant, 1]))
    assert code == -signal.SIGKILL, f"{instant!r} was never reached:\n{nursery.why()}"
    time.sleep(random.Random(SEED).uniform(0.5, 1.0) * pause_seconds)
    total = check_losses(journal)[0] + 150
    order |= {"durable_every": 1, "keep": everystep.Keep(last=1000)}
    nursery.run(**order, total=total, pause_seconds=0.005)
    check_losses(journal)
    nursery.run("adamw", total, reference)
    assert_same(journal, reference)
    check_every_base(run, reference)
    wait_until(lambda: not shadows(runtime), "every shadow to go away")


def check_every_base(run: Path, reference: Path) -> None:
    """Each base ever written is a state that training had: none is a mixture of two."""
    digests = {e["step"]: e["digest"] for e in read_journal(reference) if e["kind"] == "step"}
    digests[0] = Job("adamw").digest()
    stored = everystep.open_run(run)
    assert stored.verify().problems == [] and stored.steps[-1] == max(digests)
    for step in stored.steps:
        job = Job("adamw")
        assert everystep.restore(run, job.model, job.optimizer, step=step) == step
        assert job.digest() == digests[step], f"the base at step {step} is no state of this run"


def test_shadow_that_dies_while_it_is_asked(
    nursery: Nursery, runtime: Path, tmp_path: Path
) -> None:
    """Whoever resumes does not wait for an answer of the dead: the store has one at once."""
    run, journal = tmp_path / "run", tmp_path / "journal"
    first_life(nursery, journal, run)
    (pid,) = shadows(runtime)
    newest = check_losses(journal)[0]
    wait_until(
        lambda: (
            (run / "everystep.json").exists() and everystep.open_run(run).steps[-1:] >= [newest - 1]
        ),
        "last words",
    )
    os.kill(pid, signal.SIGSTOP)
    answers: list[RestorePoint | None] = []
    folder = runtime_dir(str(run))
    asker = threading.Thread(
        target=lambda: answers.append(find_newest(run, folder)[0]), daemon=True
    )
    asker.start()
    time.sleep(0.5)  # long enough to ask; an earlier death is seen before anything is asked
    os.kill(pid, signal.SIGKILL)
    asker.join(30)
    assert answers, "30 s after the shadow died it is still being asked"
    found = answers[0]
    assert found is not None and found.source == "store" and found.point.step >= newest - 1
