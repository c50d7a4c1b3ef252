"""Two hosts share a run's directory and see nothing of each other's processes: what one writes while the
other attaches is gone on from, or the attach is refused. It never counts as if it had not been written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.errors import Fenced
from everystep.recover.find import find_newest
from everystep.recover.loader import Loader
from everystep.store.layout import term_dir, term_numbers


def train(run: Path, until: int) -> Any:
    """Goes on to that step; returns where it began and the weights at the end."""
    torch.manual_seed(4)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with everystep.attach(model, optimizer, run=run, every=1, on_lag="wait") as attached:
        begin = attached.step
        for _ in attached.steps(until):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return begin, model.weight.detach().clone()


@pytest.fixture
def writes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Each time that a state is loaded, another host has claimed the next of these terms meanwhile."""

    def arrange(source: Path, run: Path, *numbers: int) -> None:
        left, plain = list(numbers), Loader.load

        def load(*given: Any, **more: Any) -> list[int]:
            if left:
                number = left.pop(0)
                shutil.copytree(term_dir(source, number), term_dir(run, number))
            return plain(*given, **more)

        monkeypatch.setattr(Loader, "load", load)

    return arrange


def test_what_another_host_wrote_while_we_loaded_is_gone_on_from(
    writes_meanwhile: Callable[..., None], runtime: Path, tmp_path: Path
) -> None:
    run, there, unbroken = tmp_path / "run", tmp_path / "there", tmp_path / "unbroken"
    train(run, 4)
    shutil.copytree(run, there)
    train(there, 9)
    writes_meanwhile(there, run, 2)
    begin, weights = train(run, 12)
    assert begin == 9
    assert torch.equal(weights, train(unbroken, 12)[1])
    assert term_numbers(run) == [3, 2, 1]


def test_a_run_that_others_claim_again_and_again_is_refused(
    writes_meanwhile: Callable[..., None], runtime: Path, tmp_path: Path
) -> None:
    run, there = tmp_path / "run", tmp_path / "there"
    train(run, 1)
    shutil.copytree(run, there)
    for until in (2, 3, 4):
        train(there, until)
    writes_meanwhile(there, run, 2, 3, 4)
    with pytest.raises(Fenced, match="stop this one"):
        train(run, 9)
    found, _ = find_newest(run, None)
    assert found is not None and found.point.step == 4
