"""Digests of the whole state come in parts, so that no step takes longer than others; every atom's turn comes
within the steps that were promised."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everystep.capture.census import take_census
from everystep.capture.watching.fingerprints import FingerprintSender
from everystep.core.pace import fingerprint_shares


@given(st.integers(1, 100_000))
def test_parts_fit_into_the_steps_they_have(every: int) -> None:
    shares = fingerprint_shares(every)
    assert 1 <= shares <= 32
    assert shares * (every // shares) <= every
    assert shares == 1 or every // shares >= 16, "they do not follow closely"


class Outbox:
    """Takes what a sender says."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def room(self, *_: int) -> int:
        return 0

    def address(self, at: int) -> int:
        return at

    def add(self, event: Any) -> None:
        self.events.append(event)


@pytest.mark.parametrize("every", [1, 7, 16, 33, 64, 200, 2000])
def test_every_turn_comes(every: int) -> None:
    model = nn.Sequential(*[nn.Linear(8, n) for n in (8, 8, 300, 8)][:2], nn.Linear(8, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    live = take_census(model, optimizer)
    outbox = Outbox()
    copier: Any = SimpleNamespace(sides={}, state=SimpleNamespace(piece=lambda *_, **__: None))
    sender = FingerprintSender(live, outbox, copier, every)  # type: ignore[arg-type]
    told_at: dict[tuple[int, str], list[int]] = {}
    for step in range(5 * every):
        sender.turn()
        if sender.is_due(step):
            before = len(outbox.events)
            sender.send(step)
            for event in outbox.events[before:]:
                for key in event.tensors:
                    told_at.setdefault(key, []).append(step)
    expected = {(a, s) for a in range(6) for s in ("", "/exp_avg", "/exp_avg_sq", "/step")}
    assert set(told_at) == expected
    for steps in told_at.values():
        gaps = [b - a for a, b in pairwise(steps)]
        assert max([*gaps, steps[0]]) <= every
