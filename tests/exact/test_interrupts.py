"""Ctrl-C (or any exception) in the midst of a seal: the step is not sealed, nobody waits for it, and the turn
is taken back when the loop begins again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import everystep
from everystep.capture.outbox import Outbox
from everystep.capture.seals import SealSender
from everystep.errors import UsageError

from .compare import freeze, same
from .harness import SEED, Job, look, resume, seed_all, unbroken

TOTAL = 7
FAILS_AT = 3  # the seal that ends this step


class Counter:
    """User state whose `state_dict` is interrupted once."""

    def __init__(self) -> None:
        self.count = 0
        self.interrupts = False
        self.error: type[BaseException] = KeyboardInterrupt

    def state_dict(self) -> dict[str, int]:
        if self.interrupts:
            self.interrupts = False
            raise self.error
        return {"count": self.count}

    def load_state_dict(self, stored: dict[str, int]) -> None:
        self.count = stored["count"]


def counting() -> Job:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    counter = Counter()

    def turn(step: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(5, 6) + counter.count).square().mean()
        loss.backward()
        optimizer.step()
        counter.count += 1
        return loss.detach()

    return Job(model, optimizer, turn, {"counter": counter})


def once(owner: type, name: str, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    """The next call of a method is interrupted, before or after its work."""
    real = getattr(owner, name)

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        if after:
            real(self, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


def in_state_dict(job: Job, _: pytest.MonkeyPatch) -> None:
    job.state["counter"].interrupts = True


def in_state_dict_with_an_error(job: Job, _: pytest.MonkeyPatch) -> None:
    job.state["counter"].interrupts, job.state["counter"].error = True, ValueError


def before_the_seal_is_sent(_: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    once(SealSender, "send", monkeypatch, after=False)


def after_the_seal_was_sent(_: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    once(SealSender, "send", monkeypatch, after=True)


def before_the_slot_is_published(_: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    once(Outbox, "seal", monkeypatch, after=False)


PLACES = [
    in_state_dict,
    in_state_dict_with_an_error,
    before_the_seal_is_sent,
    after_the_seal_was_sent,
    before_the_slot_is_published,
]
Place = Callable[[Job, pytest.MonkeyPatch], None]
ENDS = (KeyboardInterrupt, UsageError)


def started(run: Path) -> tuple[Job, everystep.Run]:
    seed_all(SEED)
    job = counting()
    options: dict[str, Any] = {"every": 1, "on_lag": "wait", "on_failure": "raise"}
    return job, everystep.attach(job.model, job.optimizer, run=run, state=job.state, **options)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("loop", ["steps", "bare"])
def test_a_seal_that_was_interrupted_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place, loop: str
) -> None:
    end, losses, _ = unbroken(counting, TOTAL)
    job, run = started(tmp_path / "run")
    found = {}
    began = time.monotonic()
    for attempt in range(2):
        with contextlib.suppress(*ENDS):
            for step in run.steps(TOTAL) if loop == "steps" else range(run.resume(), TOTAL):
                found[step] = freeze(job.turn(step))
                if attempt == 0 and step == FAILS_AT:
                    place(job, monkeypatch)
                if loop == "bare":
                    run.seal()
        if attempt == 0:
            assert run.step == FAILS_AT + (place is after_the_seal_was_sent)
    same(losses, found, "losses")
    same(end, look(job), "end")
    run.close()
    assert time.monotonic() - began < 30, "somebody waited for a step that is not there"
    assert everystep.open_run(tmp_path / "run").steps[-1] == TOTAL


@pytest.mark.parametrize("place", [in_state_dict, before_the_seal_is_sent])
def test_close_behind_a_seal_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    end, losses, _ = unbroken(counting, TOTAL)
    job, run = started(tmp_path / "run")
    with contextlib.suppress(KeyboardInterrupt):
        for step in run.steps(TOTAL):
            job.turn(step)
            if step == FAILS_AT:
                place(job, monkeypatch)
    with pytest.raises(UsageError, match="begin the loop again"):
        run.seal()
    began = time.monotonic()
    run.close()
    assert time.monotonic() - began < 30
    assert f"left the turn at step {FAILS_AT}" in caplog.text
    outcome = resume(counting, tmp_path / "run", TOTAL, seed=SEED + 1)
    assert outcome.start == FAILS_AT
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def test_an_opening_seal_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, losses, _ = unbroken(counting, TOTAL)
    job, run = started(tmp_path / "run")
    before_the_slot_is_published(job, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run.resume()
    found = {step: freeze(job.turn(step)) for step in run.steps(TOTAL)}
    same(losses, found, "losses")
    same(end, look(job), "end")
    run.close()
    assert everystep.open_run(tmp_path / "run").steps[-1] == TOTAL
