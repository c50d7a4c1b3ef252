"""Descriptors are few in the shadow, and a trainer may have many."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import everystep
from everystep.core.census import Atom, Census
from everystep.shadow.replica import Replica

MANY = 1200


@pytest.fixture
def many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * MANY:
        pytest.skip(f"at most {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY), hard))
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    yield
    for fd in fds:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_a_trainer_with_many_open_files(tmp_path: Path) -> None:
    """select() counts to 1024 only."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for start, end in ((0, 3), (3, 5)):
        with everystep.attach(model, optimizer, run=tmp_path / "run", on_failure="raise") as run:
            assert run.step == start
            for _ in run.steps(end):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


def test_many_slots_need_few_extents() -> None:
    atoms = tuple(Atom(f"p{i}", "float32", (257,)) for i in range(400))
    replica = Replica(Census(atoms, (), "exact"), None)
    replica.reserve_values()
    for name in ("exp_avg", "exp_avg_sq"):
        for atom in range(len(atoms)):
            replica.reserve([(atom, f"/{name}", "float32", (257,))])
    assert len(replica.extents) <= 12
    for number, key in enumerate(replica.places):
        replica.view(key)[:] = number.to_bytes(4, "little") * 257
    for number, key in enumerate(replica.places):
        assert bytes(replica.view(key)) == number.to_bytes(4, "little") * 257, "two tensors overlap"
