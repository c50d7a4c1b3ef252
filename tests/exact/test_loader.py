"""A stateful data loader goes on with the very next batch, wherever its iterator is made."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import everystep
from everystep.errors import UsageError

from .compare import freeze, same
from .harness import SEED, Job, check, look, seed_all, unbroken

torchdata = pytest.importorskip("torchdata.stateful_dataloader")

ROWS = torch.randn(22, 4, generator=torch.Generator().manual_seed(5))


class Augmented(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index]


def make_loader(workers: int) -> Any:
    return torchdata.StatefulDataLoader(
        Augmented(),
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        # workers notice the death of a trainer that is their parent; a fork server would be it otherwise
        multiprocessing_context="fork" if workers else None,
    )


def trainer(loader: Any, take: Any, begin: Any) -> Job:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def turn(step: int) -> Any:
        batch = take()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), batch

    return Job(model, optimizer, turn, {"loader": loader}, begin)


def iterating(workers: int, eager: bool) -> Job:
    """`eager` makes the iterator before the first turn, as the README says; else inside it."""
    loader = make_loader(workers)
    place: list[Iterator[Any]] = []

    def begin() -> None:
        place[:] = [iter(loader)] if eager else []

    def take() -> Any:
        if not place:
            place.append(iter(loader))
        batch = next(place[0], None)
        if batch is None:  # the epoch is over
            place[0] = iter(loader)
            batch = next(place[0])
        return batch

    return trainer(loader, take, begin)


@pytest.mark.parametrize(
    ("workers", "source", "died"),
    [(0, "store", 7), (0, "shadow", 6), (2, "shadow", 3)],
)
def test_next_batch_after_a_crash(tmp_path: Path, workers: int, source: str, died: int) -> None:
    """An epoch has six batches: step 6 dies between two of them, step 7 in the second."""
    check(partial(iterating, workers, True), tmp_path, total=9, die_at=(died,), source=source)


def test_iterator_made_inside_the_loop(tmp_path: Path) -> None:
    """Asking the loader for its place must not move the random numbers of the training."""
    check(partial(iterating, 0, False), tmp_path, total=9, die_at=(3,))


def test_iterator_made_before_attach_is_an_error(tmp_path: Path) -> None:
    job = iterating(0, True)
    job.begin()
    with pytest.raises(UsageError, match="iterator"):
        everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state)


def test_rewind_puts_the_loader_back(tmp_path: Path) -> None:
    """Back to a kept step, with a new iterator: the same batches, the same dropout."""
    build = partial(iterating, 0, True)
    end, losses, _ = unbroken(build, 6)
    seed_all(SEED)
    job = build()
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, state=job.state, on_failure="raise"
    ) as run:
        job.begin()
        for step in run.steps(5):
            if step == 2:
                run.flush(60)
            job.turn(step)
        run.rewind(2)
        job.begin()
        again = {step: freeze(job.turn(step)) for step in run.steps(6)}
        same({k: v for k, v in losses.items() if k >= 2}, again, "losses")
        same(end, look(job), "end")
