"""Every value of an optimizer's param groups, encoded: the scalars a step uses."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch

from everystep.format import values
from everystep.replay.tensors import pack

_FIXED = (type(None), bool, int, float, str, bytes)  # the same object has the same value for ever


class GroupValues:
    """Of one optimizer. Encoded anew only where a value was replaced, or may change in its place."""

    def __init__(self, optimizer: torch.optim.Optimizer, key: str) -> None:
        self._optimizer = optimizer
        self._where = f"optimizer[{key!r}].param_groups"
        self._names: list[str] = []
        self._values: list[Any] = []
        self._fixed = False
        self._encoded = b""

    def encoded(self) -> bytes:
        groups = self._optimizer.param_groups
        names = list(chain.from_iterable(groups))
        found = list(chain.from_iterable(map(dict.values, groups)))
        if self._fixed and names == self._names and all(map(is_, found, self._values)):
            return self._encoded
        told = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        self._names, self._values = names, found
        self._fixed = all(_is_fixed(value) for group in told for value in group.values())
        self._encoded = values.encode(told, self._where, pack)
        return self._encoded


def _is_fixed(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) in _FIXED
