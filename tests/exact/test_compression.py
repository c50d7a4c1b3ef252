"""Compressed training, killed: what training consumed is what the log holds, so it comes back bit for bit;
residuals of feedback come back from the shadow and from bases, and past a base as declared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.compression.compressor import residuals_of
from everystep.store import layout

from .compare import freeze, same
from .harness import SEED, Job, crash, resume, seed_all, unbroken
from .test_durable_log import lose_host

TOTAL = 20


def build(method: str, feedback: bool = False, clip: bool = False) -> Job:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    everystep.compress(optimizer, method, ratio=0.01, feedback=feedback)
    weights = list(model.parameters())
    if clip:  # after compression: values change, places do not
        optimizer.register_step_pre_hook(
            lambda *_: torch.nn.utils.clip_grad_norm_(weights, 0.01) and None
        )

    def turn(step: int) -> float:
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Job(model, optimizer, turn)


METHODS: dict[str, Callable[[], Job]] = {
    "topk": partial(build, "topk"),
    "topk-clipped": partial(build, "topk", clip=True),
    "randomk": partial(build, "randomk"),
    "int8": partial(build, "int8"),
    "fp8": partial(build, "fp8"),
    "bf16": partial(build, "bf16"),
}
with_feedback = partial(build, "topk", feedback=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_lost_host(method: str, tmp_path: Path) -> None:
    make = METHODS[method]
    end, losses, _ = unbroken(make, TOTAL)
    run = tmp_path / "run"
    lose_host(make, run, 12, 2)
    outcome = resume(make, run, TOTAL, seed=SEED + 1, durable_log=2)
    assert (outcome.start, outcome.status["resumed_from"]) == (12, "store")
    assert outcome.status["compression"][0].startswith(method.partition("-")[0])
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def test_a_sparse_log_is_small(tmp_path: Path) -> None:
    sizes = {}
    for method in ("topk", "bf16"):
        run = tmp_path / method
        lose_host(METHODS[method], run, 12, 12)
        sizes[method] = sum(path.stat().st_size for path in layout.segments(run, 1))
    assert sizes["topk"] < sizes["bf16"] / 5, "one record is a base, the others are sparse"


def residuals(job: Job) -> Any:
    return freeze(list(residuals_of([job.optimizer]).values()))


def test_feedback_survives_the_trainer(tmp_path: Path) -> None:
    end, losses, _ = unbroken(with_feedback, TOTAL)
    crash(with_feedback, tmp_path / "run", 9)
    outcome = resume(with_feedback, tmp_path / "run", TOTAL, seed=SEED + 1)
    assert (outcome.start, outcome.status["resumed_from"]) == (9, "shadow")
    assert "the log does not hold" in outcome.status["compression"][0]
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def states(total: int) -> tuple[list[Any], list[Any]]:
    """Weights and optimizer, and residuals, of every step of a run that was never broken."""
    seed_all(SEED)
    job = with_feedback()
    known, held = [], []
    for step in range(total + 1):
        known.append(freeze([job.model.state_dict(), job.optimizer.state_dict()["state"]]))
        held.append(residuals(job))
        job.turn(step)
    return known, held


def test_past_a_base_residuals_are_declared_lossy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lose_host(with_feedback, run, 12, 1)
    known, held = states(12)
    base = everystep.open_run(run).steps[-1]
    assert base < 12
    seed_all(SEED + 1)
    job = with_feedback()
    with (
        pytest.warns(UserWarning, match=f"residuals of compression are those of step {base} "),
        everystep.attach(job.model, job.optimizer, run=run) as training,
    ):
        assert training.step == 12
        now = freeze([job.model.state_dict(), job.optimizer.state_dict()["state"]])
        same(known[12], now, "weights and optimizer")
        same(held[base], residuals(job), "residuals")


def test_or_resume_goes_back_to_the_base(tmp_path: Path) -> None:
    end, losses, _ = unbroken(with_feedback, TOTAL)
    run = tmp_path / "run"
    lose_host(with_feedback, run, 12, 1)
    base = everystep.open_run(run).steps[-1]
    outcome = resume(with_feedback, run, TOTAL, seed=SEED + 1, residuals="exact", durable_log=1)
    assert outcome.start == base < 12
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def test_compression_may_end_or_begin(tmp_path: Path) -> None:
    """The model is the same with and without it."""
    job = with_feedback()
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run") as run:
        for step in run.steps(5):
            job.turn(step)
    expected = freeze(job.model.state_dict())
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 3))
    assert everystep.restore(tmp_path / "run", plain) == 5
    same(expected, freeze(plain.state_dict()), "weights")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with everystep.attach(plain, optimizer, run=tmp_path / "run") as run:
        assert run.step == 5
        for _ in run.steps(6):
            plain(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
    job = with_feedback()
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run") as run:
        assert run.step == 6
