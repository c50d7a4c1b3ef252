"""Gradients that leave during backward: only where nothing touches them after it, and never wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep

from .harness import SEED, Job
from .lagging import LaggingSide, use_lagging_sides
from .test_side_streams import net, sgd, train

STEPS = 64
LATER = 48  # the early tap is armed by then


def touched(touch: Callable[[int, nn.Module], None], micro_batches: int = 1) -> Job:
    """The user does something to the gradients between backward and step."""
    model = net()
    optimizer = sgd(model.parameters())

    def turn(step: int) -> Any:
        for _ in range(micro_batches):
            loss = model(torch.randn(4, 5)).square().mean()
            loss.backward()
        touch(step, model)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn)


def nothing(step: int, model: nn.Module) -> None:
    pass


def clipped(step: int, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clipped_later(step: int, model: nn.Module) -> None:
    if step >= LATER:
        clipped(step, model)


def unseen(step: int, model: nn.Module) -> None:
    """As GradScaler.unscale_ does it: no version tells of it."""
    for parameter in model.parameters():
        parameter.grad.data.mul_(0.5)


def unseen_later(step: int, model: nn.Module) -> None:
    if step >= LATER:
        unseen(step, model)


@pytest.fixture
def waiting_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which waiting for copies costs too much, so that an early tap is tried."""
    use_lagging_sides(monkeypatch, SEED, eagerness=0.1)
    monkeypatch.setattr(LaggingSide, "stall_seconds", property(lambda self: float(self.waits)))
    monkeypatch.setattr(LaggingSide, "window_seconds", 0.1)


@pytest.mark.usefixtures("waiting_device")
@pytest.mark.parametrize(
    ("touch", "trust", "rebases"),
    [
        (nothing, "armed", 0),
        (clipped, "refused", 0),
        (clipped_later, "refused", 0),
        (unseen, "refused", 0),
        (unseen_later, "refused", 1),  # what was copied before the digest spoke is repaired
    ],
)
def test_early_tap(touch: Any, trust: str, rebases: int, tmp_path: Path) -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    status = train(lambda: touched(touch), tmp_path / "run", STEPS)
    assert status["early_tap"] == [trust]
    was_armed = touch in (nothing, clipped_later, unseen_later)
    assert status["early_gradients"] >= 20 if was_armed else status["early_gradients"] == 0
    assert (status["rebases"], status["repairs"], status["records_dropped"]) == (rebases, 0, 0)


@pytest.mark.usefixtures("waiting_device")
def test_only_the_last_micro_batch_leaves(tmp_path: Path) -> None:
    status = train(lambda: touched(nothing, micro_batches=3), tmp_path / "run", STEPS)
    assert status["early_tap"] == ["armed"] and status["repairs"] == 0


def test_dropping_takes_the_hooks_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is recorded, backward runs none of ours; with the next base they are back."""
    use_lagging_sides(monkeypatch, SEED, eagerness=1.0)
    monkeypatch.setattr(LaggingSide, "stall_seconds", property(lambda self: float(self._queued)))
    monkeypatch.setattr(LaggingSide, "window_seconds", 0.1)
    job = touched(nothing)

    def hooked() -> bool:
        return any(p._post_accumulate_grad_hooks for p in job.model.parameters())

    run = everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, on_lag="wait", on_failure="raise"
    )
    with run as training:
        for step in training.steps(LATER + 4):
            if step == LATER:
                assert hooked()
                training._recorder.tap.record.drop()
                assert not hooked()
            if step == LATER + 2:
                training.flush(60)
                assert hooked()
            job.turn(step)
        assert training.status()["early_tap"] == ["armed"]
