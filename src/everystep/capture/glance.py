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


class Hints:
    """Address and version of every tensor; writes through `.data` change neither."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self.versions = list(map(_version, tensors))

    def after_writes(self, tensors: Sequence[torch.Tensor]) -> None:
        """The same tensors were written where they lie."""
        self.versions = list(map(_version, tensors))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Hints)
            and self.versions == other.versions
            and self.addresses == other.addresses
        )

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.addresses, self.versions, strict=True))


class Glance:
    """Which objects there are, where they lie and how often they were written."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        states: list[dict[str, Any]] = list(optimizer.state.values())
        self._owners = list(optimizer.state)
        self._names = [list(state) for state in states]
        self._values = list(chain.from_iterable(map(dict.values, states)))
        self._tensors = [v for v in self._values if isinstance(v, torch.Tensor)]
        self._hints = Hints(self._tensors)

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Follow a step that writes into its slots and replaces none. False: it made new ones."""
        slots = sum(map(len, optimizer.state.values()))
        if slots != len(self._values) or len(optimizer.state) != len(self._owners):
            return False
        self._hints.after_writes(self._tensors)
        return True

    def still_holds(self, optimizer: torch.optim.Optimizer) -> bool:
        values = list(chain.from_iterable(map(dict.values, optimizer.state.values())))
        return (
            len(values) == len(self._values)
            and len(optimizer.state) == len(self._owners)
            and all(map(is_, values, self._values))
            and all(map(is_, optimizer.state, self._owners))
            and Hints(self._tensors) == self._hints
        )

    def slots(self) -> dict[int, Slots]:
        """For every parameter (by identity) its slots."""
        known = dict(zip(map(id, self._tensors), self._hints.pairs(), strict=True))
        values = iter(self._values)
        return {
            id(owner): {
                name: (id(value), known.get(id(value)))
                for name, value in zip(names, values, strict=False)
            }
            for owner, names in zip(self._owners, self._names, strict=True)
        }
