"""Gradients that are carried over a seal: `backward` every turn, `step` every few, cleared in all ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import everystep

from .compare import freeze, same
from .harness import SEED, Job, check, look, seed_all, unbroken
from .lagging import use_lagging_sides

ADAMW = partial(optim.AdamW, lr=0.05)


class Branching(nn.Module):
    """One of its layers takes part in every third turn only: no gradient is not a zero gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 5), nn.Linear(5, 5)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if self.turn % 3 == 0 else 0)


def accumulating(window: int, kind: Callable[[Any], Any], clear: str) -> Job:
    model = Branching()
    optimizer = kind(model.parameters())

    def turn(step: int) -> Any:
        model.turn = step
        if clear == "zeros first":
            optimizer.zero_grad(set_to_none=False)
        elif clear == "none first" and step % window == 0:
            optimizer.zero_grad()
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        if step % window == window - 1:
            optimizer.step()
            if clear == "none":
                optimizer.zero_grad()
            elif clear == "zeros":
                optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return Job(model, optimizer, turn)


def in_float32(clear: str) -> Job:
    """Weights of 16 bits whose gradients are summed up in 32."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5)).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    optimizer = optim.SGD(model.parameters(), lr=0.05)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5).bfloat16()).square().mean()
        loss.backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=clear == "none")
        return loss.detach()

    return Job(model, optimizer, turn)


def sparse() -> Job:
    """A gradient of another layout stays one when it is cleared."""
    model = nn.Embedding(8, 3, sparse=True)
    optimizer = optim.SparseAdam(model.parameters(), lr=0.05)

    def turn(step: int) -> Any:
        loss = model(torch.randint(8, (4,))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return Job(model, optimizer, turn)


def clipped_as_a_whole(clear: str, leaves: frozenset[int] = frozenset()) -> Job:
    """Its head is in no optimizer, but its gradient reaches the weights through the norm of the whole. Each
    step of `leaves` is left once, by an exception behind `backward`."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    optimizer = optim.AdamW(model[0].parameters(), lr=0.05)
    left = set(leaves)

    def turn(step: int) -> Any:
        if clear == "all first":
            model.zero_grad()
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step in left:
            left.remove(step)
            raise KeyboardInterrupt
        optimizer.step()
        optimizer.zero_grad()
        if clear == "all as zeros":
            model.zero_grad(set_to_none=False)
        return loss.detach()

    return Job(model, optimizer, turn)


def lambs(parameters: Any) -> Any:
    """Not torch's: its calls are kept in a log."""
    return Scaling(parameters, {"lr": 0.05})


class Scaling(optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["m"] = 0.9 * self.state[p].get("m", torch.zeros_like(p)) + p.grad
                p.sub_(self.state[p]["m"] / (1 + p.grad.norm()), alpha=group["lr"])


JOBS = {
    "none": (4, ADAMW, "none"),
    "none_first": (4, ADAMW, "none first"),
    "zeros": (2, ADAMW, "zeros"),
    "zeros_first": (1, partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1), "zeros first"),
    "zeros_every_turn": (1, ADAMW, "zeros"),
    "never": (1, ADAMW, "never"),
    "log": (3, lambs, "none"),
}


@pytest.mark.parametrize(
    ("name", "source"),
    [*product(JOBS, ["shadow", "log"]), ("none", "store"), ("log", "store")],
)
def test_a_resume_within_a_window_has_its_gradients(tmp_path: Path, name: str, source: str) -> None:
    options = {"durable_log": 1, "durable_every": "1h"} if source == "log" else {}
    where = "shadow" if source == "shadow" else "store"
    build = partial(accumulating, *JOBS[name])
    check(build, tmp_path, total=9, die_at=(2, 5), source=where, **options)


@pytest.mark.parametrize("source", ["shadow", "store", "log"])
@pytest.mark.parametrize("clear", ["own", "all first", "all as zeros"])
def test_gradients_of_parameters_in_no_optimizer(tmp_path: Path, clear: str, source: str) -> None:
    options = {"durable_log": 1, "durable_every": "1h"} if source == "log" else {}
    where = "shadow" if source == "shadow" else "store"
    build = partial(clipped_as_a_whole, clear)
    check(build, tmp_path, total=9, die_at=(2, 5), source=where, **options)


@pytest.mark.parametrize("clear", ["own", "all first"])
def test_a_turn_that_is_taken_back_takes_them_back_too(tmp_path: Path, clear: str) -> None:
    end, losses, _ = unbroken(partial(clipped_as_a_whole, clear), 6)
    seed_all(SEED)
    job, found = clipped_as_a_whole(clear, frozenset({0, 3})), {}
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1) as run:
        for _ in range(3):
            with contextlib.suppress(KeyboardInterrupt):
                for step in run.steps(6):
                    found[step] = freeze(job.turn(step))
        same(losses, found, "losses")
        same(end, look(job), "end")


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_cleared_sparse_gradients_stay_sparse(tmp_path: Path, source: str) -> None:
    check(sparse, tmp_path, source=source)


def test_rewind_takes_gradients_back_too(tmp_path: Path) -> None:
    seed_all(SEED)
    job = accumulating(4, ADAMW, "none")
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1) as run:
        for step in run.steps(8):
            if step == 2:
                run.flush(60)
                kept = [freeze(p.grad) for p in job.model.parameters()]
            job.turn(step)
        run.rewind(2)
        assert kept == [freeze(p.grad) for p in job.model.parameters()]


def test_gradients_that_the_loop_discards_are_not_sent(tmp_path: Path) -> None:
    """A loop that clears at its start would otherwise send them all a second time."""
    seed_all(SEED)
    model = nn.Linear(64, 64)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    sent = []
    with everystep.attach(model, optimizer, run=tmp_path / "run", every=1) as run:
        for _ in run.steps(8):
            optimizer.zero_grad()
            model(torch.randn(2, 64)).square().mean().backward()
            optimizer.step()
            sent.append(run._recorder.tap.record.outbox.bytes_sent)
    each = [b - a for a, b in pairwise(sent)]
    assert each[0] > 2 * each[-1] * 0.9 and len(set(each[2:])) == 1, each


@pytest.mark.parametrize("name", ["none", "zeros"])
def test_on_a_device_that_lags(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    use_lagging_sides(monkeypatch, SEED, 0.1)
    seed_all(SEED)
    job = accumulating(*JOBS[name])
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, on_lag="wait"
    ) as run:
        for step in run.steps(7):
            if step == 6:
                run.flush(60)
                kept = [freeze(p.grad) for p in job.model.parameters()]
            job.turn(step)
    other = accumulating(*JOBS[name])
    assert everystep.restore(tmp_path / "run", other.model, other.optimizer, step=6) == 6
    assert kept == [freeze(p.grad) for p in other.model.parameters()]


def test_a_bare_loop_may_seal_turns_that_only_accumulate(tmp_path: Path) -> None:
    seed_all(SEED)
    model = nn.Linear(3, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 3)
    with everystep.attach(model, optimizer, run=tmp_path / "run", every=1) as run:
        run.resume()
        for _ in range(3):
            model(x).sum().backward()
            run.seal()
        assert run.step == 3


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_gradients_of_another_type_than_their_parameters(tmp_path: Path, source: str) -> None:
    for clear in ("none", "zeros"):
        check(partial(in_float32, clear), tmp_path / clear, total=7, die_at=(2, 5), source=source)


def test_gradients_of_another_type_in_a_log(tmp_path: Path) -> None:
    check(
        partial(in_float32, "none"), tmp_path, total=7, die_at=(2, 5), source="store", durable_log=1
    )


def headed(frozen: bool) -> Job:
    """Only the head is optimized, and only its gradients are cleared."""
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 3))
    model[0].requires_grad_(not frozen)
    optimizer = optim.AdamW(model[1].parameters(), lr=0.05)

    def turn(step: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(2, 600)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(model, optimizer, turn)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backbone_that_was_not_frozen_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, frozen: bool
) -> None:
    seed_all(SEED)
    job = headed(frozen)
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1) as run:
        for step in run.steps(4):
            job.turn(step)
        named = run.status()["unmoved_gradients"]
    assert named == ([] if frozen else ["0.weight", "0.bias"])
    told = [r.getMessage() for r in caplog.records if "in no optimizer" in r.getMessage()]
    assert len(told) == (0 if frozen else 1)
    assert all("0.weight, 0.bias; " in text and "1.4 MiB" in text for text in told), told
