"""Every optimizer of torch, in each of its implementations, goes on exactly where it was killed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from .harness import Job, check

REPLAYED: dict[str, Any] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd_single": partial(optim.SGD, lr=0.1, momentum=0.9, foreach=False, weight_decay=0.01),
    "sgd_foreach": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "nesterov_single": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "nesterov_foreach": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": partial(optim.Adam, lr=0.01, weight_decay=0.1),
    "adam_maximize": partial(optim.Adam, lr=0.01, maximize=True),
    "adamw_single": partial(optim.AdamW, lr=0.01, foreach=False),
    "adamw_foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adamw_amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True, foreach=True),
    "adamw_amsgrad_fused": partial(optim.AdamW, lr=0.01, amsgrad=True, fused=True),
    "rmsprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "rmsprop_foreach": partial(optim.RMSprop, lr=0.01, foreach=True),
    "adagrad": partial(optim.Adagrad, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.2),
    "adagrad_fused": partial(optim.Adagrad, lr=0.01, fused=True),
    "adadelta": partial(optim.Adadelta, lr=1.0, foreach=True),
    "adamax": partial(optim.Adamax, lr=0.01),
    "nadam": partial(optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": partial(optim.RAdam, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.01, t0=2),
    "rprop": partial(optim.Rprop, lr=0.01),
}
LOGGED: dict[str, Any] = {
    "muon": partial(optim.Muon, lr=0.02),
    "adafactor": partial(optim.Adafactor, lr=0.01),
    "adafactor_foreach": partial(optim.Adafactor, lr=0.01, foreach=True),
}


def mlp(bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3, bias=bias))


def many(kinds: dict[str, Any], bias: bool) -> Job:
    """One model for each optimizer, all fed the same batch."""
    models = {name: mlp(bias) for name in kinds}
    optimizers = {name: kind(models[name].parameters()) for name, kind in kinds.items()}

    def turn(step: int) -> Any:
        x = torch.randn(8, 6)
        losses = [model(x).square().mean() for model in models.values()]
        torch.stack(losses).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses)

    return Job(models, optimizers, turn)


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_replayed_optimizers(tmp_path: Path, source: str) -> None:
    check(partial(many, REPLAYED, True), tmp_path, die_at=(2, 4), source=source)


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_optimizers_replayed_at_recovery(tmp_path: Path, source: str) -> None:
    mixed = LOGGED | {"adamw": REPLAYED["adamw_fused"]}
    outcome = check(partial(many, mixed, False), tmp_path, die_at=(2, 4), source=source)
    modes = {name: mode for name, (mode, _) in outcome.status["optimizers"].items()}
    expected = {"muon": "log", "adafactor": "log", "adafactor_foreach": "log", "adamw": "replay"}
    assert modes == expected


class Words(nn.Module):
    """Embeddings whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table(index).square().mean()


def sparse() -> Job:
    models = {"adam": Words(), "sgd": Words()}
    optimizers = {
        "adam": optim.SparseAdam(models["adam"].parameters(), lr=0.1),
        "sgd": optim.SGD(models["sgd"].parameters(), lr=0.1),
    }

    def turn(step: int) -> Any:
        index = torch.randint(20, (6,))
        loss = models["adam"](index) + models["sgd"](index)
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Job(models, optimizers, turn)


def test_sparse_gradients(tmp_path: Path) -> None:
    check(sparse, tmp_path, source="store")


def wide(threads: int) -> Job:
    """Odd sizes beyond torch's grain: who computes an element must not change its bits."""
    torch.set_num_threads(threads)
    kinds = ["adamw_single", "adamw_foreach", "adamw_fused", "sgd_fused", "rmsprop", "nadam"]
    models = {name: nn.Linear(331, 401) for name in kinds}
    models["channels_last"] = nn.Conv2d(37, 61, 7).to(memory_format=torch.channels_last)
    made = {**REPLAYED, "channels_last": partial(optim.AdamW, lr=0.01, fused=True)}
    optimizers = {name: made[name](model.parameters()) for name, model in models.items()}

    def turn(step: int) -> float:
        for model in models.values():
            for p in model.parameters():
                p.grad = torch.empty_like(p).normal_()  # laid out as autograd would
        for optimizer in optimizers.values():
            optimizer.step()
        return 0.0

    return Job(models, optimizers, turn)


def test_large_parameters_whatever_the_threads(tmp_path: Path) -> None:
    try:
        check(partial(wide, 2), tmp_path, total=4, die_at=(2,))
    finally:
        torch.set_num_threads(1)
