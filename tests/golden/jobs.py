"""The trainings behind the stores. Every number in them is exact in float32, so that any processor makes the
same bytes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import everystep


class Job(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    based: tuple[int, ...]  # steps of the bases
    total: int
    logged: bool = True  # whether steps behind the last base are in a log

    def turn(self, step: int) -> None:
        for number, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            places = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.grad = ((places * 7 + step * 3 + number) % 11 - 5).float()
        self.optimizer.step()

    def digests(self) -> dict[str, str]:
        """Of every weight and slot."""
        names = dict(self.model.named_parameters())
        found = {name: _digest(value) for name, value in names.items()}
        for name, value in names.items():
            slots = self.optimizer.state.get(value, {})
            found |= {f"{name}:{slot}": _digest(t) for slot, t in slots.items() if t is not None}
        return found


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()[:32]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 64)
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.5, momentum=0.5)


def dense() -> Job:
    """A base, and the log behind it."""
    model = nn.Linear(5, 3)
    return Job(model, _sgd(model), (1,), 3)


def compressed() -> Job:
    """The same, with a log of few words."""
    model = nn.Linear(64, 32, bias=False)
    optimizer = _sgd(model)
    everystep.compress(optimizer, "topk", ratio=0.01)
    return Job(model, optimizer, (1,), 2)


def references() -> Job:
    """Two bases, the later of which refers to the earlier one, which has a tag."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    return Job(model, _sgd(model), (1, 3), 3, logged=False)


JOBS: dict[str, Callable[[], Job]] = {
    "dense": dense,
    "compressed": compressed,
    "references": references,
}
TAG = "early"
Known = dict[str, dict[str, dict[str, Any]]]
"""Of every store, by step and name, the digest of each tensor."""
