"""Copies that are done much later than they are queued: every way in which training overwrites what is
still being copied. The device is simulated, so that the worst order happens, on any machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import everystep
from everystep.capture.copying import state_copies
from everystep.capture.watching.fingerprints import FingerprintSender

from .harness import SEED, Job, look, same, seed_all, unbroken
from .lagging import LaggingSide, use_lagging_sides

STEPS = 8


def net() -> nn.Module:
    """Tensors on both sides of the limit up to which gradients are packed."""
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 300_000 // 4), nn.Tanh())


def trained(optimizer_of: Callable[[Any], Any], clear: Callable[[Any, Any], None]) -> Job:
    model = net()
    optimizer = optimizer_of(model.parameters())

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        clear(model, optimizer)
        return loss.detach()

    return Job(model, optimizer, turn)


def to_none(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def to_zero(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


def data_to_zero(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.data.zero_()


def sgd(parameters: Any) -> Any:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def nesterov(parameters: Any) -> Any:
    return optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def fused(parameters: Any) -> Any:
    return optim.AdamW(parameters, lr=0.01, fused=True)


class Scribbling(optim.SGD):
    """A user's optimizer that uses its gradients as scratch memory."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.fill_(7)
        return result


def scribbling(parameters: Any) -> Any:
    return Scribbling(parameters, lr=0.1)


def scaled() -> Job:
    """A fused optimizer unscales inside step() and writes the result into p.grad."""
    model = net()
    optimizer = fused(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        if step == 4:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn, {"scaler": scaler})


def between_forward_and_backward() -> Job:
    model = net()
    optimizer = sgd(model.parameters())

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return Job(model, optimizer, turn)


def state_only() -> Job:
    """LBFGS cannot be logged: its state is copied while the next step computes."""
    model = nn.Linear(5, 300)
    optimizer = optim.LBFGS(model.parameters(), max_iter=2)

    def turn(step: int) -> Any:
        x = torch.randn(4, 5)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return Job(model, optimizer, turn)


JOBS: dict[str, Callable[[], Job]] = {
    "none": lambda: trained(sgd, to_none),
    "zero": lambda: trained(sgd, to_zero),
    "data_zero": lambda: trained(sgd, data_to_zero),
    "nesterov": lambda: trained(nesterov, to_none),
    "fused": lambda: trained(fused, to_none),
    "scribbling": lambda: trained(scribbling, to_none),
    "scaled": scaled,
    "between": between_forward_and_backward,
    "state": state_only,
}


def train(
    build: Callable[[], Job], run: Path, steps: int = STEPS, **options: Any
) -> dict[str, Any]:
    """Train with everystep, then compare what the store holds with the live state."""
    seed_all(SEED)
    job = build()
    given = {"every": 1, "on_lag": "wait", "on_failure": "raise", **options}
    with everystep.attach(job.model, job.optimizer, run=run, state=job.state, **given) as training:
        for step in training.steps(steps):
            job.turn(step)
        status = training.status()
    end, live = look(job), look(job, whole=False)
    seed_all(SEED + 1)
    again = build()
    assert everystep.restore(run, again.model, again.optimizer) == steps
    same(live, look(again, whole=False), "restored")
    same(unbroken(build, steps)[0], end, "trained")
    return status


@pytest.mark.parametrize("name", JOBS)
def test_late_copies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    sides = use_lagging_sides(monkeypatch, SEED, eagerness=0.1)
    status = train(JOBS[name], tmp_path / "run")
    assert sum(side.waits for side in sides) > 0, "nothing was ever late"
    assert (status["repairs"], status["records_dropped"]) == (0, 0)


@pytest.mark.parametrize("name", ["zero", "data_zero", "nesterov", "scribbling", "scaled"])
def test_late_copies_that_nobody_waits_for_go_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs above do overwrite what is being copied: without the wait it shows."""
    # fingerprints would have it repaired
    monkeypatch.setattr(FingerprintSender, "is_due", lambda self, step: False)
    use_lagging_sides(monkeypatch, SEED, eagerness=0.0)
    monkeypatch.setattr(LaggingSide, "wait_for_copy", lambda self, mark: None)
    with pytest.raises(AssertionError, match="restored"):
        train(JOBS[name], tmp_path / "run")


@pytest.mark.parametrize("waits", [True, False])
def test_sealed_state_is_what_a_step_had(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State is copied after its seal, while the next step begins; and it does change in that step."""
    use_lagging_sides(monkeypatch, SEED, eagerness=0.0)
    if not waits:
        monkeypatch.setattr(LaggingSide, "wait_for_copy", lambda self, mark: None)
    seed_all(SEED)
    job, seen = state_only(), {}
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1) as training:
        for step in training.steps(STEPS):
            seen[step] = look(job, whole=False)
            job.turn(step)
            if step == 5:  # the optimizer has stepped: only what was sealed before may count
                assert training.flush(60) == 5
                again = state_only()
                assert everystep.restore(training.path, again.model, again.optimizer, step=5) == 5
                restored = look(again, whole=False)
    if waits:
        same(seen[5], restored, "restored")
    else:
        with pytest.raises(AssertionError, match="restored"):
            same(seen[5], restored, "restored")


def edited_in_flight() -> Job:
    """Weights are edited between a seal and the next step, while the state of that seal is copied."""
    job = state_only()
    inner = job.turn

    def turn(step: int) -> Any:
        if step == 4:
            with torch.no_grad():
                job.model.weight.mul_(0.5)
        return inner(step)

    job.turn = turn
    return job


def test_state_edited_while_it_is_copied_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_lagging_sides(monkeypatch, SEED, eagerness=0.0)
    status = train(edited_in_flight, tmp_path / "run")
    assert status["records_dropped"] > 0


def static() -> Job:
    """Gradients that are new for some steps, then written in place: kept ones are overwritten once."""
    model = net()
    optimizer = sgd(model.parameters())

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step < 5)
        return loss.detach()

    return Job(model, optimizer, turn)


def test_gradients_written_in_place_from_some_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept in good faith is noticed one step later, and everything is re-based."""
    use_lagging_sides(monkeypatch, SEED, eagerness=0.0)
    status = train(static, tmp_path / "run")
    assert status["rebases"] == 1


@pytest.mark.parametrize("free_bytes", [0, 500_000, 1 << 30])
def test_state_that_does_not_fit_before_the_next_step(
    free_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the link has no time for is snapshotted where memory is free, or the step waits for it."""
    monkeypatch.setattr(LaggingSide, "link_bytes_per_second", 1e6)
    monkeypatch.setattr(LaggingSide, "window_seconds", 2.0)
    monkeypatch.setattr(LaggingSide, "peak_bytes", free_bytes)
    monkeypatch.setattr(state_copies, "_CUT_BYTES", 1 << 16)
    use_lagging_sides(monkeypatch, SEED, eagerness=0.1)
    status = train(JOBS["none"], tmp_path / "run", tuning=everystep.Tuning(log=False))
    assert bool(status["snapshots"]) == bool(free_bytes)
    assert status["records_dropped"] == 0


def adapter_of_something_huge() -> Job:
    """A frozen tensor larger than the ring, which is made for the tiny part that is trained."""
    model = nn.ModuleDict({"huge": nn.Embedding(160_000, 256), "small": nn.Linear(5, 3)})
    model["huge"].requires_grad_(False)
    optimizer = sgd(model["small"].parameters())

    def turn(step: int) -> Any:
        loss = model["small"](torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn)


def test_an_atom_larger_than_the_ring_is_based(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_lagging_sides(monkeypatch, SEED, eagerness=0.5)
    status = train(adapter_of_something_huge, tmp_path / "run", on_lag="drop")
    assert status["records_dropped"] == 0
