"""How an optimizer's state looks, taken quickly enough for every step: no slot is visited in Python unless
something did change."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

Slots = dict[str, tuple[int, int]]  # name: identity and version
_version = attrgetter("_version")


class Glance:
    """Which objects there are and how often they were written. Versions are hints: writes through `.data`
    do not count."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        states: list[dict[str, Any]] = list(optimizer.state.values())
        self._owners = list(optimizer.state)
        self._names = [list(state) for state in states]
        self._values = list(chain.from_iterable(map(dict.values, states)))
        self._tensors = [v for v in self._values if isinstance(v, torch.Tensor)]
        self._versions = list(map(_version, self._tensors))

    def still_holds(self, optimizer: torch.optim.Optimizer) -> bool:
        values = list(chain.from_iterable(map(dict.values, optimizer.state.values())))
        return (
            len(values) == len(self._values)
            and len(optimizer.state) == len(self._owners)
            and all(map(is_, values, self._values))
            and all(map(is_, optimizer.state, self._owners))
            and list(map(_version, self._tensors)) == self._versions
        )

    def slots(self) -> dict[int, Slots]:
        """For every parameter (by identity) its slots."""
        versions = dict(zip(map(id, self._tensors), self._versions, strict=True))
        values = iter(self._values)
        return {
            id(owner): {
                name: (id(value), versions.get(id(value), 0))
                for name, value in zip(names, values, strict=False)
            }
            for owner, names in zip(self._owners, self._names, strict=True)
        }
