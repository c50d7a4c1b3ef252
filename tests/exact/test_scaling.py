"""GradScaler, that unscales outside or inside the optimizer and skips; closures, LBFGS."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from .harness import Job, check, together

SKIPPED = (0, 2, 3)  # the first step too: an optimizer that never stepped has no state


def scaled(make: Any, clip: bool, skipped: tuple[int, ...] = SKIPPED) -> Job:
    model = nn.Linear(5, 2)
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        scaler.scale(loss).backward()
        if step in skipped:
            model.weight.grad[0, 0] = float("inf")
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach(), scaler.get_scale()

    return Job(model, optimizer, turn, {"scaler": scaler})


SCALED = partial(
    together,
    plain=partial(scaled, partial(optim.AdamW, lr=0.01), False),
    clipped=partial(scaled, partial(optim.SGD, lr=0.1, momentum=0.9), True),
    fused=partial(scaled, partial(optim.AdamW, lr=0.01, fused=True), False),
    fused_clipped=partial(scaled, partial(optim.AdamW, lr=0.01, fused=True), True),
    # torch leaves the momentum of fused SGD uninitialised when its first step is skipped
    fused_sgd=partial(
        scaled, partial(optim.SGD, lr=0.1, momentum=0.9, fused=True), False, skipped=(2, 3)
    ),
)


@pytest.mark.parametrize(("source", "died"), [("shadow", 3), ("store", 4)])
def test_scalers_that_skip(tmp_path: Path, source: str, died: int) -> None:
    check(SCALED, tmp_path, total=7, die_at=(died,), source=source)


def scaled_and_turned() -> Job:
    """Its weight lies the other way round: the user's own optimizer replays, and unscales as it does."""
    model = nn.Conv2d(2, 3, (2, 1)).to(memory_format=torch.channels_last)
    optimizer = optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 2, 3, 1)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn, {"scaler": scaler})


def test_a_log_that_is_handed_on_keeps_its_scaled_gradients(tmp_path: Path) -> None:
    """It is replayed at every resume: what the kernel unscales must be a copy."""
    check(scaled_and_turned, tmp_path, total=7, die_at=(2, 4), source="shadow")


def closing(make: Any, by_name: bool) -> Job:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = make(model.parameters())

    def turn(step: int) -> Any:
        x = torch.randn(8, 5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        return torch.as_tensor(loss).detach()

    return Job(model, optimizer, turn)


CLOSURES = partial(
    together,
    sgd=partial(closing, partial(optim.SGD, lr=0.1, momentum=0.9), False),
    sgd_by_name=partial(closing, partial(optim.SGD, lr=0.1, momentum=0.9), True),
    adam=partial(closing, partial(optim.Adam, lr=0.01), False),
    adafactor=partial(closing, partial(optim.Adafactor, lr=0.01), False),
    lbfgs=partial(closing, partial(optim.LBFGS, lr=0.5, max_iter=4, history_size=5), False),
    wolfe=partial(closing, partial(optim.LBFGS, line_search_fn="strong_wolfe", max_iter=3), False),
)


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_closures(tmp_path: Path, source: str) -> None:
    check(CLOSURES, tmp_path, source=source)


def long_memory() -> Job:
    """A history many times as large as the weights: it outgrows what a slot was made for."""
    model = nn.Linear(80, 40)
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=20, history_size=100)

    def turn(step: int) -> Any:
        x = torch.randn(16, 80)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x).sin() - x[:, :40]).square().mean()
            loss.backward()
            return loss

        return torch.as_tensor(optimizer.step(closure)).detach()

    return Job(model, optimizer, turn)


def test_state_that_outgrows_its_slot(tmp_path: Path) -> None:
    check(long_memory, tmp_path, total=5)
