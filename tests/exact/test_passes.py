"""Records that are replayed several at a time, and bases that such a pass copies on its way: every stored
step is the state that training had."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import everystep
from everystep import native

from .compare import freeze

pytestmark = pytest.mark.skipif(native.library() is None, reason="the twins were not compiled")
STEPS = 160


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 5))
    model[2].bias.requires_grad_(False)  # what no pass comes by is copied too
    return model, torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, nesterov=True
    )


def test_every_stored_step_is_what_training_had(tmp_path: Path) -> None:
    model, optimizer = build()
    states = {}
    with everystep.attach(
        model,
        optimizer,
        run=tmp_path / "run",
        every=1,
        durable_every=7,
        keep=everystep.Keep(last=1000),
        on_failure="raise",
        on_lag="wait",
    ) as run:
        for step in run.steps(STEPS):
            states[step] = freeze([model.state_dict(), optimizer.state_dict()["state"]])
            if step == 100:
                time.sleep(1.5)  # no pass comes by meanwhile
            model(torch.randn(8, 40)).square().mean().backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (1 + step)
            optimizer.step()
            optimizer.zero_grad()
        states[STEPS] = freeze([model.state_dict(), optimizer.state_dict()["state"]])
        status = run.status()
    assert status["exactness"] == "exact" and status["records_dropped"] == 0
    assert status["replay_passes"] < 0.8 * status["records"], "nothing was replayed together"
    stored = everystep.open_run(tmp_path / "run").steps
    assert len(stored) >= 3 and stored[-1] == STEPS
    for step in stored:
        other, its = build()
        assert everystep.restore(tmp_path / "run", other, its, step=step) == step
        found = freeze([other.state_dict(), its.state_dict()["state"]])
        assert found == states[step], f"step {step} differs"


@pytest.mark.parametrize(
    "change", [{"nesterov": True}, {"weight_decay": 0.1}, {"foreach": True}, {"momentum": 0.0}]
)
def test_steps_that_are_computed_in_another_way(change: dict[str, float], tmp_path: Path) -> None:
    model = nn.Linear(30, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    with everystep.attach(
        model, optimizer, run=tmp_path / "run", every=1, on_failure="raise"
    ) as run:
        for step in run.steps(20):
            if step == 10:
                optimizer.param_groups[0].update(change)
            model(torch.randn(8, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = freeze([model.state_dict(), optimizer.state_dict()["state"]])
    other = nn.Linear(30, 20)
    its = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    assert everystep.restore(tmp_path / "run", other, its) == 20
    assert freeze([other.state_dict(), its.state_dict()["state"]]) == expected
