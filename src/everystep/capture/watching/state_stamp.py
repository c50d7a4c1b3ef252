"""How an optimizer's state looks, taken quickly enough for every step: no slot is visited in Python unless
something did change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from everystep.errors import UnsupportedState

Slots = dict[str, tuple[int, object]]  # name: identity, and the hints of a tensor
_version = attrgetter("_version")
_PARAMETERS = {torch.nn.Parameter, torch.Tensor}


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


def has_other_keys(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.state` holds something under a key that is no tensor."""
    kinds = set(map(type, optimizer.state))
    return not kinds <= _PARAMETERS and any(not issubclass(k, torch.Tensor) for k in kinds)


def states_of(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Parameters and their slots. What lies under other keys goes with the groups."""
    owners, states = list(optimizer.state), list(optimizer.state.values())
    if has_other_keys(optimizer):
        places = [i for i, owner in enumerate(owners) if isinstance(owner, torch.Tensor)]
        owners, states = [owners[i] for i in places], [states[i] for i in places]
    if not set(map(type, states)) <= {dict}:
        for owner, state in zip(owners, states, strict=True):
            check_slots(state, f"optimizer.state of a parameter of shape {list(owner.shape)}")
    return owners, states


def check_slots(state: object, where: str) -> None:
    if not isinstance(state, dict):
        raise UnsupportedState(
            f"{where}: a {type(state).__name__}, expected a dict of slots",
            hint="keep what belongs to a parameter under a name: optimizer.state[p]['name'] = ...",
        )


class StateStamp:
    """Which objects there are, where they lie and how often they were written."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._owners, states = states_of(optimizer)
        self._names = [list(state) for state in states]
        self._all_names = list(chain.from_iterable(states))
        self._values = list(chain.from_iterable(map(dict.values, states)))
        self._tensors = [
            v for v in self._values if isinstance(v, torch.Tensor) and v.layout is torch.strided
        ]
        self._hints = Hints(self._tensors)

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Follow a step that writes into its slots and replaces none. False: it made new ones."""
        owners, states = states_of(optimizer)
        if sum(map(len, states)) != len(self._values) or len(owners) != len(self._owners):
            return False
        self._hints.after_writes(self._tensors)
        return True

    def still_holds(self, optimizer: torch.optim.Optimizer) -> bool:
        owners, states = states_of(optimizer)
        values = list(chain.from_iterable(map(dict.values, states)))
        return (
            len(values) == len(self._values)
            and len(owners) == len(self._owners)
            and all(map(is_, values, self._values))
            and list(chain.from_iterable(states)) == self._all_names
            and all(map(is_, owners, self._owners))
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
