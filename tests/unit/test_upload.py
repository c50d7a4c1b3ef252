"""Staged copies put every byte in its place, whatever the sizes and however they share a buffer."""

from __future__ import annotations

import random

import pytest
import torch

from everystep.recover import upload
from everystep.recover.upload import Staging


@pytest.mark.parametrize("seed", range(5))
def test_everything_arrives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_HALF_BYTES", 4096)
    chance = random.Random(seed)
    sizes = [chance.choice([0, 1, 7, 1023, 1024, 1025, 5000, 20_000]) for _ in range(40)]
    sources = [
        torch.rand(size, dtype=chance.choice([torch.float32, torch.float64])) for size in sizes
    ]
    targets = [torch.full_like(source, -1) for source in sources]
    staging = Staging(torch.device("cpu"))
    for target, source in zip(targets, sources, strict=True):
        staging.copy(target, source)
    staging.finish()
    assert all(torch.equal(t, s) for t, s in zip(targets, sources, strict=True))
