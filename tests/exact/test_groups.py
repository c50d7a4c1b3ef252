"""Param groups that differ, schedulers that move them, tensors as learning rates."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

from .harness import Job, check, together


def trained(model: nn.Module, optimizer: Any, after: Any, state: dict[str, Any]) -> Job:
    """The plain loop; `after` is what the user does once the optimizer has stepped."""

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(loss.detach())
        return loss.detach()

    return Job(model, optimizer, turn, state)


def differing() -> Job:
    """Groups with values of their own, a user's key among them, changed by hand during the run."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
    first, last = model[0].parameters(), model[1].parameters()
    optimizer = optim.AdamW(
        [
            {"params": first, "lr": 0.1, "note": "trunk", "tags": ("a", 1)},
            {"params": last, "weight_decay": 0.0, "betas": (0.8, 0.95), "amsgrad": True},
        ],
        lr=0.01,
    )

    def by_hand(loss: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.7
        optimizer.param_groups[1]["betas"] = (0.8, optimizer.param_groups[1]["betas"][1] * 0.99)

    return trained(model, optimizer, by_hand, {})


def scheduled(make: Any, tensor_lr: bool = False, with_loss: bool = False) -> Job:
    model = nn.Linear(5, 2)
    lr = torch.tensor(0.1) if tensor_lr else 0.1
    optimizer = optim.Adam(model.parameters(), lr=lr)
    scheduler = make(optimizer)

    def after(loss: torch.Tensor) -> None:
        scheduler.step(loss) if with_loss else scheduler.step()

    return trained(model, optimizer, after, {"scheduler": scheduler})


def fading(step: int) -> float:
    return 1 / (1 + step)


def sequential(optimizer: Any) -> Any:
    parts = [
        lrs.LinearLR(optimizer, total_iters=2),
        lrs.CosineAnnealingWarmRestarts(optimizer, 3),
        lrs.ExponentialLR(optimizer, 0.9),
    ]
    return lrs.SequentialLR(optimizer, parts, milestones=[2, 5])


SCHEDULED = partial(
    together,
    differing=differing,
    multistep=partial(scheduled, partial(lrs.MultiStepLR, milestones=[2, 2, 5], gamma=0.3)),
    onecycle=partial(scheduled, partial(lrs.OneCycleLR, max_lr=0.2, total_steps=20)),
    sequential=partial(scheduled, sequential),
    plateau=partial(
        scheduled, partial(lrs.ReduceLROnPlateau, patience=0, factor=0.5), with_loss=True
    ),
    lambda_=partial(scheduled, partial(lrs.LambdaLR, lr_lambda=fading)),
    tensor=partial(scheduled, partial(lrs.StepLR, step_size=2), tensor_lr=True),
    tensor_cosine=partial(scheduled, partial(lrs.CosineAnnealingLR, T_max=9), tensor_lr=True),
)


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_groups_and_schedulers(tmp_path: Path, source: str) -> None:
    check(SCHEDULED, tmp_path, total=7, die_at=(4,), source=source)


def growing(at: int, before_step: bool, kind: Any = optim.AdamW) -> Job:
    """A second group joins at step `at`; whoever resumes builds only the first."""
    model = nn.ModuleDict({"first": nn.Linear(5, 4), "later": nn.Linear(4, 2)})
    optimizer = kind(model["first"].parameters(), lr=0.05)

    def grow(step: int) -> None:
        if step == at:
            optimizer.add_param_group({"params": model["later"].parameters(), "lr": 0.2})

    def turn(step: int) -> Any:
        loss = model["later"](model["first"](torch.randn(4, 5))).square().mean()
        model.zero_grad()
        loss.backward()
        if before_step:
            grow(step)
        optimizer.step()
        if not before_step:
            grow(step)
        return loss.detach()

    return Job(model, optimizer, turn)


@pytest.mark.parametrize(("source", "kind"), [("shadow", optim.AdamW), ("store", optim.Adafactor)])
def test_group_added_before_a_step(tmp_path: Path, source: str, kind: Any) -> None:
    check(partial(growing, 2, True, kind), tmp_path, die_at=(4,), source=source)


@pytest.mark.parametrize("died", [2, 3])
def test_group_added_after_a_step(tmp_path: Path, died: int) -> None:
    """Killed in the very step that added it, and in the first that would use it."""
    check(partial(growing, 2, False), tmp_path, die_at=(died,))
