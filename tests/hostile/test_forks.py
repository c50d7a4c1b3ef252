"""A trainer that forks: the child has its hooks and its ring, and harms neither. A ring that somebody else
wrote into is replaced at once."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import everystep
from everystep.errors import LaneError, UsageError
from everystep.lane.ring import RingWriter


class Job:
    def __init__(self, run: Path) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 3)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.run = everystep.attach(
            self.model, self.optimizer, run=run, on_lag="wait", on_failure="raise"
        )

    def turn(self) -> None:
        self.model(torch.randn(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path / "run")
    yield made
    made.run.close()


def in_a_fork(work: Callable[[], object], log: Path) -> str:
    """What a forked process said that did this."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            handler = logging.FileHandler(log)
            logging.getLogger("everystep").addHandler(handler)
            work()
            code = 0
        except BaseException:
            log.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    said = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = log.read_text() if log.exists() else ""
    assert said == 0, text
    return text


def test_a_child_that_steps(job: Job, tmp_path: Path) -> None:
    """It trains by itself, is told once that nobody records it, and its parent's record goes on exactly."""
    weights = []

    def train() -> None:
        for _ in range(5):
            job.turn()
        assert not torch.equal(job.model.weight, before)

    for step in job.run.steps(12):
        if step in (0, 3, 7):
            before = job.model.weight.detach().clone()
            said = in_a_fork(train, tmp_path / f"log{step}")
            assert said.count("is not recorded") == 1, said
            assert torch.equal(job.model.weight, before)
        job.turn()
        weights.append(job.model.weight.detach().clone())
        status = job.run.status()
        assert status["health"] == "ok", status["problem"]
    assert job.run.flush(60) == 12
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert everystep.restore(tmp_path / "run", model, optimizer) == 12
    assert torch.equal(model.weight, weights[-1])


def test_a_child_may_not_use_the_run(job: Job, tmp_path: Path) -> None:
    def use() -> None:
        for call in (job.run.seal, job.run.resume, job.run.flush, lambda: job.run.steps(9)):
            with pytest.raises(UsageError, match="forked from the trainer"):
                call()
        assert "forked" in repr(job.run)
        job.run.close()  # as at the end of a with block: it is the parent's to end

    for step in job.run.steps(4):
        job.turn()
        if step == 2:
            in_a_fork(use, tmp_path / "log")
    assert job.run.step == 4
    assert job.run.status()["health"] == "ok"


def test_a_child_goes_on_with_the_loop(job: Job, tmp_path: Path) -> None:
    """The next turn is refused, before anything is sealed."""
    seen = []
    for step in job.run.steps(5):
        job.turn()
        if step == 1 and (pid := os.fork()) == 0:
            try:
                next(job.run.steps(5))
            except UsageError:
                os._exit(7)
            os._exit(1)
        seen.append(step)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert seen == [0, 1, 2, 3, 4]


def test_a_child_may_attach_a_run_of_its_own(job: Job, tmp_path: Path) -> None:
    def train() -> None:
        own = Job(tmp_path / "own")
        for _ in own.run.steps(3):
            own.turn()
        own.run.close()
        assert everystep.open_run(tmp_path / "own").steps[-1] == 3

    for step in job.run.steps(3):
        job.turn()
        if step == 1:
            in_a_fork(train, tmp_path / "log")
    assert job.run.status()["health"] == "ok"


def test_a_ring_that_another_process_wrote_into_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork that Python did not see. The shadow would wait for a slot that nobody fills."""
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with everystep.attach(model, optimizer, run=tmp_path / "run", on_lag="wait") as run:
        for step in run.steps(1000):
            time.sleep(0.02 if step > 4 else 0)  # a new shadow takes a second
            if step == 3:
                recorder = run._recorder
                assert recorder is not None and recorder.link.connection is not None
                ring = recorder.link.connection.ring
                other = RingWriter.__new__(RingWriter)
                other.__dict__.update(ring.__dict__)
                assert other.take() is not None
                with pytest.raises(LaneError, match="another process writes into it"):
                    ring.take()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                assert "another process writes into it" in run.status()["problem"]
            if step > 4 and run.status()["health"] == "ok":
                break
        assert run.status()["health"] == "ok"
    assert "another process writes into it" in caplog.text
    assert everystep.open_run(tmp_path / "run").steps[-1] == run.step
