"""Trainings that made the valid stores, and that attach to what became of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import everystep


class Job(NamedTuple):
    model: nn.Module
    optimizer: Any
    state: dict[str, Any]
    options: dict[str, Any]

    def turn(self, step: int) -> None:
        optimizers = self.optimizer if isinstance(self.optimizer, dict) else {"": self.optimizer}
        loss = self.model(torch.randn(4, 6)).square().mean()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        for member in self.state.values():
            if hasattr(member, "step"):
                member.step()


class Own(torch.optim.Optimizer):
    """Nobody else can replay it: bases of it have a log tail, and slots that are no tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"], state["word"] = state.get("count", 0) + 1, ("odd", "even")
                    state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                    p.sub_(state["mean"], alpha=group["lr"])


def plain() -> Job:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    notes = {
        "tensor": torch.arange(3.0),
        "kinds": (torch.float16, torch.Size([2, 3]), torch.device("cpu")),
        "array": np.zeros(2, [("step", "i4"), ("loss", "f8")]),
        (1, "a"): {"set": {1, 2}, "big": 2**70, "none": None},
    }
    state = {"sched": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "notes": notes}
    return Job(
        model, optimizer, state, {"every": 1, "durable_log": 1, "keep": everystep.Keep(last=3)}
    )


def own() -> Job:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    first, second = (layer.parameters() for layer in (model[0], model[2]))
    optimizers = {"own": Own(first), "sgd": torch.optim.SGD(second, lr=0.1)}
    return Job(
        model, optimizers, {}, {"every": 1, "durable_log": 2, "keep": everystep.Keep(last=3)}
    )


def sparse() -> Job:
    """Its log holds the words that are not zero, and some of its bases have no slots."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 2000), nn.Linear(2000, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    everystep.compress(optimizer, "topk", ratio=0.02)
    return Job(
        model,
        optimizer,
        {},
        {"every": 1, "durable_log": 1, "keep": everystep.Keep(slots=1, last=3)},
    )


JOBS: dict[str, Callable[[], Job]] = {"plain": plain, "own": own, "sparse": sparse}


def train(name: str, run: Path, *, bucket: str | None = None) -> None:
    """Two lives, a few bases each, a log behind every one, a tag."""
    for life in range(2):
        job = JOBS[name]()
        options = {**job.options, "bucket": bucket, "on_failure": "raise"}
        with everystep.attach(
            job.model, job.optimizer, run=run, state=job.state, **options
        ) as live:
            for step in live.steps(5 * life + 6):
                job.turn(step)
                if step % 5 == 3:
                    live.flush()
                if step == 3:
                    live.tag("early")
