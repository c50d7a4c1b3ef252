"""How an optimizer's state looks, taken quickly enough for every step: no atom is visited in Python
unless something did change."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch

Slots = dict[str, tuple[int, object]]  # name: identity, and address and version of a tensor


class Glance:
    """Which objects there are, where their memory lies and how often they were written. Versions are
    hints: writes through `.data` do not count."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        states: list[dict[str, Any]] = list(optimizer.state.values())
        self._owners = list(optimizer.state)
        self._counts = list(map(len, states))
        self._names = list(chain.from_iterable(states))
        self._values = list(chain.from_iterable(map(dict.values, states)))
        self._marks = [
            (v.data_ptr(), v._version) if isinstance(v, torch.Tensor) else None
            for v in self._values
        ]

    def same_as(self, other: Glance) -> bool:
        return (
            self._counts == other._counts
            and self._marks == other._marks
            and all(map(is_, self._owners, other._owners))
            and all(map(is_, self._values, other._values))
            and self._names == other._names
        )

    def slots(self) -> dict[int, Slots]:
        """For every parameter (by identity) its slots."""
        return {id(owner): dict(own) for owner, own in zip(self._owners, self._cut(), strict=True)}

    def _cut(self) -> Iterator[list[tuple[str, tuple[int, object]]]]:
        at = 0
        for count in self._counts:
            part = slice(at, at + count)
            marks = zip(map(id, self._values[part]), self._marks[part], strict=True)
            yield list(zip(self._names[part], marks, strict=True))
            at += count
