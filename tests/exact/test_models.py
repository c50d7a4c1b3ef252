"""Models as people write them: GANs, tied and frozen weights, buffers, dropout, bf16, NaN."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from .harness import Job, check, together


def gan() -> Job:
    """Two models, two optimizers, three calls a step: the critic steps twice."""
    models = {"g": nn.Linear(3, 5), "d": nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))}
    optimizers = {
        "critic": optim.RMSprop(models["d"].parameters(), lr=0.01),
        "maker": optim.Adam(models["g"].parameters(), lr=0.01, betas=(0.5, 0.9)),
    }

    def turn(step: int) -> Any:
        for _ in range(2):
            optimizers["critic"].zero_grad()
            fake = models["g"](torch.randn(4, 3)).detach()
            loss = models["d"](fake).mean() - models["d"](torch.randn(4, 5)).mean()
            loss.backward()
            optimizers["critic"].step()
        optimizers["maker"].zero_grad()
        score = -models["d"](models["g"](torch.randn(4, 3))).mean()
        score.backward()  # leaves gradients in the critic, which nobody may mistake for its next
        optimizers["maker"].step()
        return loss.detach(), score.detach()

    return Job(models, optimizers, turn)


class Tied(nn.Module):
    """Embedding and output share one weight; one layer is frozen; two branches take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.even, self.odd, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, index: torch.Tensor, step: int) -> torch.Tensor:
        hidden = self.frozen(self.embed(index))
        hidden = (self.even if step % 2 == 0 else self.odd)(hidden)
        return self.out(hidden)


def tied() -> Job:
    model = Tied()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def turn(step: int) -> Any:
        index = torch.randint(11, (5,))
        loss = nn.functional.cross_entropy(model(index, step), index)
        optimizer.zero_grad(set_to_none=step != 3)  # None is not zero: zero decays and moves
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(model, optimizer, turn)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.mask[random.randrange(4)] ^= True
        return (self.drop(self.norm(self.conv(x))).mean(2) * self.mask).square().mean()


def noisy() -> Job:
    """BatchNorm's statistics, buffers of any type, and all three random generators."""
    model = Noisy()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def turn(step: int) -> Any:
        shift = np.random.randn() + random.gauss(0, 1)  # both keep a spare normal between draws
        loss = model(torch.randn(3, 2, 7) + shift)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn)


def narrow(kind: Any) -> Job:
    """bf16 weights, whose optimizer state is bf16 too."""
    model = nn.Linear(5, 3).to(torch.bfloat16)
    optimizer = kind(model.parameters(), lr=0.01)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn)


def poisoned() -> Job:
    """NaNs with payloads and signs: comparing as numbers would call them all different, or equal."""
    model = nn.Linear(4, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bits = torch.tensor([0x7FC00001, 0x7FC0BEEF, -0x3FFFFF, 0x7F800000], dtype=torch.int32)

    def turn(step: int) -> Any:
        model(torch.randn(3, 4)).square().mean().backward()
        if step == 2:
            with torch.no_grad():
                model.weight.grad[0] = bits.view(torch.float32)
        optimizer.step()
        optimizer.zero_grad()
        return model.weight.detach().clone()

    return Job(model, optimizer, turn)


def accumulating() -> Job:
    """Three micro-batches a step, clipped; the gradient logged is the one that was used."""
    model = nn.Linear(6, 2)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)

    def turn(step: int) -> Any:
        for _ in range(3):
            (model(torch.randn(4, 6)).square().mean() / 3).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the same memory holds the next gradient
        return norm

    return Job(model, optimizer, turn)


ALL = partial(
    together,
    gan=gan,
    tied=tied,
    noisy=noisy,
    bf16=partial(narrow, optim.AdamW),
    bf16_sgd=partial(narrow, partial(optim.SGD, momentum=0.9)),
    nan=poisoned,
    accumulating=accumulating,
)


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_models_of_every_kind(tmp_path: Path, source: str) -> None:
    check(ALL, tmp_path, source=source, die_at=(4,), total=7)


class Reassigning(nn.Module):
    """Gives its buffer a new tensor every time, as `self.average = ...` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.mean(0)
        return (self.inner(x) - self.average).square().mean()


def reassigning() -> Job:
    model = Reassigning()
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn)


def test_buffers_that_are_reassigned(tmp_path: Path) -> None:
    check(reassigning, tmp_path)
