"""A log of what the device consumed, replayed on the device: every bit comes back, dense or sparse."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from exact.damage import flip
from torch import nn

import everystep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("method", ["", "topk", "randomk", "int8"])
def test_a_lost_host(method: str, fused: bool, tmp_path: Path) -> None:
    model, optimizer = train_and_lose_the_host(tmp_path / "run", method, fused)
    expected = [tensor.clone() for tensor in state_of(model, optimizer)]
    assert everystep.open_run(tmp_path / "run").steps[-1] < 20
    comes_back(tmp_path / "run", model, optimizer, 20, expected)


@pytest.mark.parametrize("method", ["", "topk"])
def test_damage_that_is_met_on_the_way(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps before it are being replayed on the device by then."""
    model, optimizer = train_and_lose_the_host(tmp_path / "run", method, True)
    assert everystep.restore(tmp_path / "run", model, optimizer, step=11) == 11
    expected = [tensor.clone() for tensor in state_of(model, optimizer)]
    flip(tmp_path / "run", 12, "gradients")
    comes_back(tmp_path / "run", model, optimizer, 11, expected)
    assert "damage_met_on_the_way" in caplog.text


class HostLost(Exception): ...


def train_and_lose_the_host(
    path: Path, method: str, fused: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 1023), nn.GELU(), nn.Linear(1023, 257)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    if method:
        everystep.compress(optimizer, method, ratio=0.01)
    with contextlib.suppress(HostLost):
        lose_the_host(path, model, optimizer)
    return model, optimizer


def comes_back(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    expected: list[torch.Tensor],
) -> None:
    with torch.no_grad():
        for tensor in state_of(model, optimizer):
            tensor.zero_()
    assert everystep.restore(path, model, optimizer) == step
    pairs = zip(expected, state_of(model, optimizer), strict=True)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def lose_the_host(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Twenty steps that only the log holds when the shadow is killed."""
    options: dict[str, Any] = {"every": 1, "durable_log": 1, "durable_every": "1h"}
    options["on_lag"] = "wait"
    with everystep.attach(model, optimizer, run=path, **options) as run:
        run.resume()
        run.flush()
        for _ in range(20):
            model(torch.randn(32, 256, device=DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.seal()
        deadline = time.monotonic() + 60
        while (status := run.status())["durable_step"] != 20:
            assert time.monotonic() < deadline, status
            time.sleep(0.01)
        os.kill(status["pid"], signal.SIGKILL)
        raise HostLost


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    slots = (t for s in optimizer.state.values() for _, t in sorted(s.items()))
    return [t.detach() for t in (*model.parameters(), *slots)]
