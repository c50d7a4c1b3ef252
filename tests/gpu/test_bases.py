"""Bases that take several steps, state at every step, periodic bases: each is a state that training had,
bit for bit, and none raises the peak of device memory by more than 32 MiB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 40


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """About 50 M parameters, so that a first slice of 64 MiB is only part of a base."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(256, 4096), nn.BatchNorm1d(4096), nn.GELU(), nn.Linear(4096, 8192), nn.GELU()
    )
    model.append(nn.Linear(8192, 1024))
    model.append(nn.Linear(1024, 1024))
    model.cuda()
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def turn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(4096, 256, device="cuda")
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    slots = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [t.detach().cpu().clone() for t in (*model.state_dict().values(), *slots)]


def peak_without(kind: str) -> int:
    model, optimizer = build(kind)
    for _ in range(6):
        turn(model, optimizer)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        turn(model, optimizer)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sgd", {"every": 1}),
        ("adamw", {"every": 1, "tuning": everystep.Tuning(log=False)}),
        ("sgd", {"every": 7}),
        ("adamw", {"every": 7}),
    ],
)
def test_what_is_stored_is_what_training_had(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    peak = peak_without(kind)
    torch.cuda.empty_cache()
    model, optimizer = build(kind)
    before = torch.cuda.memory_allocated()
    with everystep.attach(
        model, optimizer, run=tmp_path / "run", on_lag="wait", on_failure="raise", **options
    ) as run:
        for _ in run.steps(STEPS):
            turn(model, optimizer)
            if run.step == 10:
                torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        more = torch.cuda.max_memory_allocated() - max(peak, before)
        expected = state(model, optimizer)
        status = run.status()
    fresh, other = build(kind)
    assert everystep.restore(run.path, fresh, other) == STEPS
    for number, (a, b) in enumerate(zip(expected, state(fresh, other), strict=True)):
        assert torch.equal(a, b), f"tensor {number} differs"
    assert more <= 32 << 20, f"{more / 2**20:.0f} MiB more at the peak"
    assert status["records_dropped"] == 0
