"""Hundreds of steps on the device: at every fingerprint and at the end the shadow has the trainer's bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import everystep
from everystep.bench.gpt import Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = int(os.environ.get("EVERYSTEP_LONG_STEPS", "300"))
# the first base comes in slices; how many steps that takes is the machine's
_MOST_STEPS = 20 * STEPS
_EVERY = 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Job(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    turn: Callable[[], None]
    state: dict[str, Any]


def gpt() -> Job:
    """Fused AdamW, clipping and a cosine schedule."""
    training = Training(
        os.environ.get("EVERYSTEP_LONG_MODEL", "gpt-350m"), 4, "adamw-fused", compiled=False
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, STEPS)
    weights = list(training.model.parameters())

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)

    training.optimizer.register_step_pre_hook(clip)

    def turn() -> None:
        training.step()
        schedule.step()

    return Job(training.model, training.optimizer, turn, {"schedule": schedule})


class Residual(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width // stride, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = stride == 1
        self.way = (
            nn.Identity() if same else nn.Conv2d(width // stride, width, 1, stride, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.way(x))


def resnet() -> Job:
    """BatchNorm, whose statistics change without a trace, and SGD with nesterov."""
    blocks = [Residual(w, s) for w, s in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1))]
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )

    def turn() -> None:
        images = torch.randn(64, 3, 32, 32, device=DEVICE)
        labels = torch.randint(10, (64,), device=DEVICE)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Job(model, optimizer, turn, {})


def scaled() -> Job:
    """fp16 with a GradScaler that begins so large that steps are skipped, inside the fused kernel."""
    model = nn.Sequential(
        nn.Linear(256, 1023), nn.GELU(), nn.Linear(1023, 1023), nn.GELU(), nn.Linear(1023, 64)
    )
    model = model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**30, growth_interval=20)

    def turn() -> None:
        x = torch.randn(128, 256, device=DEVICE)
        with torch.autocast(DEVICE, torch.float16):
            loss = (model(x) - x[:, :64]).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Job(model, optimizer, turn, {"scaler": scaler})


def state_of(job: Job) -> list[torch.Tensor]:
    slots = (t for s in job.optimizer.state.values() for _, t in sorted(s.items()))
    return [t.detach() for t in (*job.model.state_dict().values(), *slots)]


@pytest.mark.parametrize("build", [gpt, resnet, scaled])
def test_every_bit_for_hundreds_of_steps(build: Callable[[], Job], tmp_path: Path) -> None:
    torch.manual_seed(1)
    job = build()
    with everystep.attach(
        job.model,
        job.optimizer,
        run=tmp_path / "run",
        state=job.state,
        every=1,
        tuning=everystep.Tuning(fingerprint_every=_EVERY),
        durable_every="1h",
        on_lag="wait",
        on_failure="raise",
    ) as run:
        run.resume()
        end, based_at = _MOST_STEPS, 0
        while run.step < end:
            job.turn()
            run.seal()
            if not based_at and run.status()["mode"] == "every step":
                based_at, end = run.step, run.step + STEPS
        run.flush()
        status = run.status()
        expected = [tensor.clone() for tensor in state_of(job)]
    assert status["exactness"] == "exact"
    assert (status["repairs"], status["rebases"], status["records_dropped"]) == (0, 0, 0)
    assert based_at, f"the first base did not arrive in {_MOST_STEPS} steps"
    assert status["fingerprints_checked"] >= STEPS // _EVERY
    for tensor in state_of(job):
        tensor.zero_()
    assert everystep.restore(run.path, job.model, job.optimizer) == end
    for number, (a, b) in enumerate(zip(expected, state_of(job), strict=True)):
        assert torch.equal(a.cpu(), b.cpu()), f"tensor {number} differs"
