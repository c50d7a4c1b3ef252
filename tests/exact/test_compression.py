"""Compressed training, killed: what training consumed is what the log holds, so it comes back bit for bit;
residuals of feedback come back from the shadow and from bases, and past a base as declared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ondisk
import pytest
import torch
from torch import nn

import everystep
from everystep.compression.compressor import residuals_of

from .compare import freeze, same
from .harness import SEED, Job, check, crash, look, resume, seed_all, unbroken
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
        sizes[method] = sum(path.stat().st_size for path in ondisk.segments(run, 1))
    assert sizes["topk"] < sizes["bf16"] / 5, "one record is a base, the others are sparse"


def residuals(job: Job) -> Any:
    return freeze(list(residuals_of(job.model.parameters()).values()))


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
        everystep.attach(job.model, job.optimizer, run=run, every=1) as training,
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
    outcome = resume(
        with_feedback,
        run,
        TOTAL,
        seed=SEED + 1,
        tuning=everystep.Tuning(residuals="exact"),
        durable_log=1,
    )
    assert outcome.start == base < 12
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def large() -> Job:
    """Gradients and residuals of a step take several slots: some entries hold nothing that is logged."""
    model = nn.Sequential(*[nn.Linear(1100, 1100) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    everystep.compress(optimizer, "topk", ratio=0.01, feedback=True)
    return _job(model, optimizer, 1100)


def idle() -> Job:
    """An optimizer whose parameters have no gradient: its calls hold nothing."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64))
    unused = nn.Linear(256, 256)
    optimizers = {
        "used": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "idle": torch.optim.AdamW(unused.parameters(), lr=1e-2),
    }

    def turn(step: int) -> float:
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Job({"model": model, "unused": unused}, optimizers, turn)


def channels_last() -> Job:
    """Edits of weights that do not lie in row-major order."""
    model = nn.Sequential(nn.Conv2d(8, 40, 3), nn.Conv2d(40, 8, 3))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def turn(step: int) -> float:
        loss = model(torch.randn(2, 8, 9, 9)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[0].weight.clamp_(-0.05, 0.05)
        return loss.item()

    return Job(model, optimizer, turn)


def _job(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Job:
    def turn(step: int) -> float:
        loss = model(torch.randn(8, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Job(model, optimizer, turn)


@pytest.mark.parametrize("make", [large, idle, channels_last])
def test_a_lost_host_of_an_unusual_job(make: Callable[[], Job], tmp_path: Path) -> None:
    lose_host(make, tmp_path / "run", 8, 1)
    seed_all(SEED)
    job = make()
    for step in range(8):
        job.turn(step)
    again = make()
    assert everystep.restore(tmp_path / "run", again.model, again.optimizer) == 8
    expected, found = look(job, whole=False), look(again, whole=False)
    same(expected, found, "weights and optimizers")


def test_state_without_a_log_of_gradients_can_be_logged(tmp_path: Path) -> None:
    """Every record brings the state anew: bases do not follow each other for it."""
    job = build("bf16")
    with everystep.attach(
        job.model,
        job.optimizer,
        run=tmp_path / "run",
        every=1,
        tuning=everystep.Tuning(log=False),
        durable_log=1,
        durable_every="1h",
        keep=everystep.Keep(last=1000),
        on_lag="wait",
    ) as run:
        for step in run.steps(40):
            job.turn(step)
            time.sleep(0.01)
    assert len(everystep.open_run(tmp_path / "run").steps) < 10


def test_a_closure_is_compressed(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    everystep.compress(optimizer, "topk", ratio=0.01)

    def closure() -> float:
        parameter.grad = torch.randn(1000)
        return 1.0

    assert optimizer.step(closure) == 1.0
    assert parameter.count_nonzero() == 10
    optimizer.step(closure=closure)
    assert parameter.count_nonzero() <= 20


def test_what_overflowed_is_not_held_back() -> None:
    """A fused step that a GradScaler skips said nothing, and residuals stay what they were."""
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    everystep.compress(optimizer, "topk", ratio=0.01, feedback=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        held = residuals_of([parameter])[parameter].clone()
        gradient = torch.randn(1000)
        if step == 2:
            gradient[7] = torch.inf
        scaler.scale((parameter * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now = residuals_of([parameter])[parameter]
        assert torch.equal(held, now) is (step == 2)
    assert parameter.isfinite().all() and now.isfinite().all()


def test_parameters_that_come_later_are_fed_back_too(tmp_path: Path) -> None:
    first, later = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.ModuleList([first, later])
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    everystep.compress(optimizer, "topk", ratio=0.1, feedback=True)
    with everystep.attach(
        model, optimizer, run=tmp_path / "run", every=1, on_failure="raise"
    ) as run:
        for step in run.steps(6):
            if step == 3:
                optimizer.add_param_group({"params": list(later.parameters())})
            (first(torch.randn(4, 8)) + later(torch.randn(4, 8))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(residuals_of(model.parameters())) == 4
    names = {atom.name for atom in everystep.open_run(tmp_path / "run").base().census.atoms}
    assert {"0.weight.residual", "1.bias.residual"} <= names


def grows() -> Job:
    """Its second half comes in a param group of its own, with residuals of its own."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    everystep.compress(optimizer, "topk", ratio=0.1, feedback=True)

    def turn(step: int) -> Any:
        if step == 1:
            optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.05})
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item(), [freeze(residuals_of([p]).get(p)) for p in model.parameters()]]

    return Job(model, optimizer, turn)


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_residuals_of_groups_that_came_later_come_back(source: str, tmp_path: Path) -> None:
    """A script builds the optimizer as it was at first: the groups come back before their residuals do."""
    check(grows, tmp_path, source=source, tuning=everystep.Tuning(residuals="exact"))


def replaces() -> Job:
    """Puts another parameter in the place of its first one, when the optimizer has stepped."""
    job = build("topk", feedback=True)

    def turn(step: int) -> Any:
        loss = plain(step)
        if step == 4:
            layer, group = job.model[0], job.optimizer.param_groups[0]
            old, layer.weight = layer.weight, nn.Parameter(layer.weight.detach() * 0.5)
            group["params"] = [layer.weight if p is old else p for p in group["params"]]
            job.optimizer.state.pop(old)
        return loss

    plain, job.turn = job.turn, turn
    return job


def test_parameters_that_are_replaced_are_fed_back_too(tmp_path: Path) -> None:
    end, losses, _ = unbroken(replaces, TOTAL)
    crash(replaces, tmp_path / "run", 9)
    outcome = resume(replaces, tmp_path / "run", TOTAL, seed=SEED + 1)
    assert (outcome.start, outcome.status["resumed_from"]) == (9, "shadow")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def test_compression_may_end_or_begin(tmp_path: Path) -> None:
    """The model is the same with and without it."""
    job = with_feedback()
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1) as run:
        for step in run.steps(5):
            job.turn(step)
    expected = freeze(job.model.state_dict())
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 3))
    assert everystep.restore(tmp_path / "run", plain) == 5
    same(expected, freeze(plain.state_dict()), "weights")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with everystep.attach(plain, optimizer, run=tmp_path / "run", every=1) as run:
        assert run.step == 5
        for _ in run.steps(6):
            plain(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
    job = with_feedback()
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1) as run:
        assert run.step == 6


def test_what_a_broken_turn_held_back_of_a_later_group_goes_with_the_group(tmp_path: Path) -> None:
    """The turn is done again, and the group added again: it began with what the first attempt had left."""

    def trained(attach: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(7)
        model = torch.nn.Linear(6, 5)
        model.bias.requires_grad_(False)
        optimizer = torch.optim.SGD([model.weight], lr=0.1)
        everystep.compress(optimizer, "topk", ratio=0.3, feedback=True)
        run = everystep.attach(
            model,
            optimizer,
            run=tmp_path / "run",
            tuning=everystep.Tuning(residuals="exact"),
            enabled=attach,
        )
        for attempt in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                for step in run.steps(6):
                    if step == 3:
                        model.bias.requires_grad_(True)
                        optimizer.add_param_group({"params": [model.bias]})
                    model(torch.randn(4, 6)).square().sum().backward()
                    optimizer.step()
                    if attach and attempt == 0 and step == 3:
                        raise KeyboardInterrupt
                    optimizer.zero_grad()
        run.close()
        return model.state_dict()

    expected, found = trained(False), trained(True)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
