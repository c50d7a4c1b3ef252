"""`everystep.data`: a loader without state goes on with the very next batch, over data epochs without end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import everystep
from everystep.errors import UsageError

from .compare import freeze, same
from .harness import Job, check, seed_all, together

ROWS = torch.randn(22, 4, generator=torch.Generator().manual_seed(5))
EPOCH = 6  # batches


class Augmented(TensorDataset):
    """Draws for every sample, as augmentations do: in the trainer without workers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index] + torch.rand(()) + random.random()


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, draws: bool = False) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        mine = ROWS if worker is None else ROWS[worker.id :: worker.num_workers]
        for row in mine:
            yield row + torch.rand(()) if self.draws else row


def plain() -> Any:
    return DataLoader(Augmented(ROWS), batch_size=4, shuffle=True)


def own_generator() -> Any:
    generator = torch.Generator().manual_seed(torch.initial_seed() % 1000)  # another in every life
    return DataLoader(Augmented(ROWS), batch_size=4, shuffle=True, generator=generator)


def workers() -> Any:
    kind: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
    return DataLoader(Augmented(ROWS), batch_size=4, shuffle=True, **kind)


def stream_of_workers() -> Any:
    kind: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
    return DataLoader(Stream(draws=True), batch_size=4, **kind)


def stream() -> Any:
    return DataLoader(Stream(), batch_size=4)


def by_epoch() -> Any:
    sampler = DistributedSampler(Augmented(ROWS), 1, 0, seed=3)
    return DataLoader(Augmented(ROWS), batch_size=4, sampler=sampler)


def stateful() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Augmented(ROWS), batch_size=4, shuffle=True)


LOADERS = {
    make.__name__: make
    for make in (plain, own_generator, workers, stream_of_workers, stream, by_epoch, stateful)
}


def trainer(make: Any) -> Job:
    batches = everystep.data(make())
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def turn(step: int) -> Any:
        batch = next(batches)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), batch, batches.epoch, batches.batch

    return Job(model, optimizer, turn, {"data": batches})


def all_of_them() -> Job:
    return together(**{name: partial(trainer, make) for name, make in LOADERS.items()})


def test_killed_in_the_second_data_epoch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every kind of loader at once: the same batches, the same dropout, the same weights. One life ends
    between two data epochs, the next in the middle of the second."""
    outcome = check(all_of_them, tmp_path, total=14, die_at=(EPOCH, EPOCH + 3))
    _, (_, _, _, epoch, batch), *_ = outcome.losses[EPOCH + 3].values()
    assert (epoch, batch) == (freeze(1), freeze(4))
    told = capfd.readouterr().err
    skipping = [line for line in told.splitlines() if "skipped 3 batches of data epoch 1" in line]
    assert len(skipping) == len(LOADERS) - 1, told  # not the loader that knows its place


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_order_is_that_of_a_plain_loop(make: Any) -> None:
    seed_all(3)
    loader = make()
    expected = []
    for epoch in range(3):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        expected += [(epoch, batch) for batch in loader]
    drawn = torch.rand(3)
    seed_all(3)
    batches = everystep.data(make())
    found = [(batches.epoch, batch) for batch in islice(iter(batches), 3 * EPOCH)]
    same(freeze(expected), freeze(found), "data epochs and batches")
    same(freeze(drawn), freeze(torch.rand(3)), "random states")


def test_back_to_the_beginning() -> None:
    """A place is taken back too, by an object that is in the middle of another data epoch."""
    generator = torch.Generator().manual_seed(4)
    batches = everystep.data(DataLoader(list(range(22)), 4, shuffle=True, generator=generator))
    place = batches.state_dict()
    first = [next(batches).tolist() for _ in range(EPOCH + 2)]
    batches.load_state_dict(place)
    assert (batches.epoch, batches.batch) == (0, 0)
    assert [next(batches).tolist() for _ in range(EPOCH + 2)] == first
    assert first[EPOCH:] != first[:2], "every data epoch has an order of its own"


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(UsageError, match="more than once"):
        everystep.data(iter(plain()))
    with pytest.raises(UsageError, match="no batch in data epoch 0"):
        next(everystep.data([]))
    place = everystep.data([1, 2, 3])
    next(place), next(place)
    shorter: Any = everystep.data([1])
    shorter.load_state_dict(place.state_dict())
    with pytest.raises(UsageError, match="data epoch 0 has 1 batches, the run was at 2"):
        next(shorter)
    drawing = everystep.data(DataLoader(Stream(draws=True), batch_size=4))
    with pytest.warns(UserWarning, match="draws from the global random states"):
        next(drawing), next(drawing)
    lazy: Any = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    kept = everystep.data(DataLoader(Augmented(ROWS), batch_size=4, **lazy))
    kept.load_state_dict({**kept.state_dict(), "epoch": 1, "batch": 1, "random": rng()})
    with pytest.warns(UserWarning, match="persistent_workers"):
        next(kept)


def rng() -> bytes:
    from everystep.capture.rng import capture_rng

    return capture_rng()


def test_a_loader_without_state_is_refused_with_the_way_out(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(
        UsageError, match=r"DataLoader without[\s\S]*everystep\.data\(loader\)[\s\S]*Stateful"
    ):
        everystep.attach(net, optimizer, run=tmp_path / "run", every=1, state={"data": plain()})
