"""Copies on several ranks are compared: who disagrees is named, by rank, atom and step."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import everystep
from everystep.errors import SilentCorruption, UsageError
from everystep.ranks import outlier_ranks

_RANKS, _EVERY, _STEPS = 4, 5, 30
_forks = multiprocessing.get_context("forkserver")


def rank_main(rank: int, place: str, plan: dict[str, Any], answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{place}/meet", rank=rank, world_size=plan["ranks"])
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.Linear(50, 3))
    ddp = nn.parallel.DistributedDataParallel(model)
    if plan.get("own"):
        with torch.no_grad():
            model[2].bias.add_(rank)  # a parameter that is no copy
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)  # every rank sees other data
    said: list[str] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch = everystep.compare_ranks(
                ddp, optimizer, every=_EVERY, on_mismatch=plan.get("on_mismatch", "warn")
            )
            with watch:
                for step in range(_STEPS):
                    ddp(torch.randn(8, 20)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if (rank, step) == plan.get("flip"):
                        flip(optimizer, model[0].weight, plan["where"])
            said = [str(w.message) for w in caught if "everystep" in str(w.message)]
    except SilentCorruption as error:
        said = [str(error)]
    found = [tuple(d) for d in watch.found]
    answers.put((rank, found, watch.compared, watch.not_replicated, said))
    answers.close()
    answers.join_thread()
    dist.destroy_process_group()


def flip(optimizer: torch.optim.Optimizer, weight: torch.Tensor, where: str) -> None:
    tensor = weight.data if where == "" else optimizer.state[weight][where]
    tensor.view(-1).view(torch.int32)[123] ^= 1 << 9


def run_ranks(place: Path, **plan: Any) -> list[tuple[Any, ...]]:
    plan = {"ranks": _RANKS, **plan}
    answers = _forks.Queue()
    processes = [
        _forks.Process(target=rank_main, args=(rank, str(place), plan, answers))
        for rank in range(plan["ranks"])
    ]
    for process in processes:
        process.start()
    try:
        return sorted(answers.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()


@pytest.mark.parametrize("where", ["", "exp_avg"])
def test_a_flipped_bit_on_one_rank_is_named(where: str, tmp_path: Path) -> None:
    for _, found, compared, others, said in run_ranks(tmp_path, flip=(2, 11), where=where):
        assert found[0][:3] == (15, 2, "0.weight"), "within `every` steps, by every rank"
        assert {rank for _, rank, _, _ in found} == {2}
        assert compared == _STEPS // _EVERY and others == []
        assert len(said) == 1 and "rank 2" in said[0] and "step 15" in said[0]


def test_nothing_is_said_of_a_healthy_job(tmp_path: Path) -> None:
    for _, found, compared, others, said in run_ranks(tmp_path, own=True):
        assert found == [] and said == [] and compared == _STEPS // _EVERY
        assert others == ["2.bias"], "what differs from the beginning is nobody's copy"


def test_it_can_raise(tmp_path: Path) -> None:
    for _, found, *_, said in run_ranks(
        tmp_path, flip=(0, 7), where="", on_mismatch="raise", ranks=3
    ):
        assert found[0][:3] == (10, 0, "0.weight") and "rank 0" in said[0]


def test_without_a_process_group() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="no process group"):
        everystep.compare_ranks(model, torch.optim.SGD(model.parameters()))


@given(st.integers(), st.integers(3, 9), st.data())
def test_the_odd_one(usual: int, ranks: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers().filter(lambda n: n != usual))
    rank = data.draw(st.integers(0, ranks - 1))
    numbers = [wrong if r == rank else usual for r in range(ranks)]
    assert outlier_ranks(numbers) == [rank]
    assert outlier_ranks([usual, wrong]) == [None]
