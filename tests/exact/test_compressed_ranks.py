"""Compressed communication between real ranks: every rank gets the same bits; what is not said at one step
is said later, with feedback; and what DDP hands to the optimizer is what the log holds."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everystep
from everystep.compression.compressor import residuals_of

from .compare import freeze, same
from .harness import SEED, Job, _forks, crash, resume, seed_all, unbroken
from .test_durable_log import lose_host

RANKS, STEPS, TOTAL = 2, 4, 16


def network() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 5))


@pytest.fixture(autouse=True)
def _no_group_stays() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def one_rank(rank: int, port: int, method: str, feedback: bool, place: Path) -> None:
    """Gradients as DDP gives them, and as they were before anything was said of them."""
    try:
        torch.set_num_threads(1)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        together, alone = DistributedDataParallel(network()), network()
        everystep.compress(together, method, ratio=0.1, feedback=feedback)
        got, own = [], []
        for step in range(STEPS):
            torch.manual_seed(100 * rank + step)
            data = torch.randn(8, 16)
            for model, kept in ((together, got), (alone, own)):
                model.zero_grad()
                model(data).square().mean().backward()
                kept.append([p.grad.clone() for p in model.parameters()])
        held = [r.clone() for r in residuals_of(together.parameters()).values()]
        torch.save((got, own, held), place / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (place / f"{rank}.error").write_text(traceback.format_exc())
        raise


def all_ranks(place: Path, method: str, feedback: bool) -> list[Any]:
    arguments = (free_port(), method, feedback, place)
    ranks = [_forks.Process(target=one_rank, args=(rank, *arguments)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
    errors = [path.read_text() for path in place.glob("*.error")]
    assert not errors, errors[0]
    return [torch.load(place / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("method", ["topk", "bf16"])
def test_ranks_agree_on_what_was_said(method: str, tmp_path: Path) -> None:
    (got, first, _), (other, second, _) = all_ranks(tmp_path, method, feedback=False)
    same(freeze(got), freeze(other), "gradients of both ranks")
    for step in range(STEPS):
        count = size = 0
        for g, a, b in zip(got[step], first[step], second[step], strict=True):
            if method == "bf16":
                assert torch.equal(g, (a.bfloat16().float() + b.bfloat16().float()) / RANKS)
            else:
                known = torch.stack([torch.zeros_like(a), a / 2, b / 2, (a + b) / 2])
                assert (g == known).any(0).all(), "something was said that no rank had"
            count, size = count + int(g.count_nonzero()), size + g.numel()
        if method == "topk":
            assert 0 < count <= RANKS * (size // 10 + 4)


@pytest.mark.parametrize("method", ["topk", "int8", "fp8"])
def test_what_is_held_back_is_said_later(method: str, tmp_path: Path) -> None:
    reports = all_ranks(tmp_path, method, feedback=True)
    same(freeze(reports[0][0]), freeze(reports[1][0]), "gradients of both ranks")
    for i in range(len(reports[0][2])):
        said = sum(RANKS * reports[0][0][step][i] for step in range(STEPS))
        meant = sum(own[step][i] for _, own, _ in reports for step in range(STEPS))
        held = sum(residuals[i] for _, _, residuals in reports)
        assert held.count_nonzero()
        assert torch.allclose(said + held, meant, rtol=1e-4, atol=1e-6)


def distributed(method: str, feedback: bool) -> Job:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(network())
    everystep.compress(model, method, ratio=0.05, feedback=feedback)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def turn(step: int) -> float:
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Job(model, optimizer, turn)


topk, with_feedback = partial(distributed, "topk", False), partial(distributed, "topk", True)
powersgd = partial(distributed, "powersgd", False)


def test_what_overflowed_is_not_held_back() -> None:
    job = with_feedback()
    job.turn(0)
    held = [r.clone() for r in residuals_of(job.model.parameters()).values()]
    (job.model(torch.randn(8, 16)).square().mean() * torch.inf).backward()
    now = list(residuals_of(job.model.parameters()).values())
    assert not all(p.grad.isfinite().all() for p in job.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(held, now, strict=True))


def test_the_bare_model_has_residuals_too(tmp_path: Path) -> None:
    job = with_feedback()
    with everystep.attach(job.model.module, job.optimizer, run=tmp_path / "run", every=1) as run:
        for step in run.steps(3):
            job.turn(step)
        assert "feedback" in run.status()["compression"][0]
    names = {atom.name for atom in everystep.open_run(tmp_path / "run").base().census.atoms}
    assert "0.weight.residual" in names


def test_feedback_of_ddp_survives_the_trainer(tmp_path: Path) -> None:
    end, losses, _ = unbroken(with_feedback, TOTAL)
    crash(with_feedback, tmp_path / "run", 7)
    outcome = resume(with_feedback, tmp_path / "run", TOTAL, seed=SEED + 1)
    assert (outcome.start, outcome.status["resumed_from"]) == (7, "shadow")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


@pytest.mark.parametrize("make", [topk, powersgd])
def test_a_lost_host(make: Callable[[], Job], tmp_path: Path) -> None:
    """PowerSGD's own memory begins anew, so only the step that was reached is the same."""
    lose_host(make, tmp_path / "run", 11, 1)
    seed_all(SEED)
    job = make()
    for step in range(11):
        job.turn(step)
    again = make()
    assert everystep.restore(tmp_path / "run", again.model, again.optimizer) == 11
    for part in ("model", "optimizer"):
        expected, found = (getattr(j, part).state_dict() for j in (job, again))
        same(freeze(expected), freeze(found), part)
    if make is topk:
        end, losses, _ = unbroken(make, TOTAL)
        outcome = resume(make, tmp_path / "run", TOTAL, seed=SEED + 1, durable_log=1)
        assert outcome.start == 11
        same(losses, {**losses, **outcome.losses}, "losses")
        same(end, outcome.end, "end")
