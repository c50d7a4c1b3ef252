"""How an optimizer's state looks, taken quickly enough for every step: no slot is visited in Python unless
something did change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

Slots = dict[str, tuple[int, object]]  # name: identity, and the hints of a tensor
_version = attrgetter("_version")


def hints(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and version of every tensor; writes through `.data` change neither."""
    return list(zip(map(torch.Tensor.data_ptr, tensors), map(_version, tensors), strict=True))


class Glance:
    """Which objects there are, where they lie and how often they were written."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        states: list[dict[str, Any]] = list(optimizer.state.values())
        self._owners = list(optimizer.state)
        self._names = [list(state) for state in states]
        self._values = list(chain.from_iterable(map(dict.values, states)))
        self._tensors = [v for v in self._values if isinstance(v, torch.Tensor)]
        self._hints = hints(self._tensors)

    def still_holds(self, optimizer: torch.optim.Optimizer) -> bool:
        values = list(chain.from_iterable(map(dict.values, optimizer.state.values())))
        return (
            len(values) == len(self._values)
            and len(optimizer.state) == len(self._owners)
            and all(map(is_, values, self._values))
            and all(map(is_, optimizer.state, self._owners))
            and hints(self._tensors) == self._hints
        )

    def slots(self) -> dict[int, Slots]:
        """For every parameter (by identity) its slots."""
        known = dict(zip(map(id, self._tensors), self._hints, strict=True))
        values = iter(self._values)
        return {
            id(owner): {
                name: (id(value), known.get(id(value)))
                for name, value in zip(names, values, strict=False)
            }
            for owner, names in zip(self._owners, self._names, strict=True)
        }
