"""Everything there is to compare of a training, by category, as values that `==` compares by their bits."""

from __future__ import annotations

import collections
import hashlib
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from exact.compare import freeze

CATEGORIES = ("weights", "buffers", "slots", "groups", "state", "loss", "random")


def look(model: Any, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """All but the loss and the random states."""
    models = dict(model) if isinstance(model, dict) else {"": model}
    optimizers = dict(optimizer) if isinstance(optimizer, dict) else {"": optimizer}
    weights = {f"{k}.{n}": p for k, m in models.items() for n, p in m.named_parameters()}
    buffers = {f"{k}.{n}": b for k, m in models.items() for n, b in m.named_buffers()}
    names = {id(t): n for n, t in [*buffers.items(), *weights.items()]}
    return {
        "weights": frozen(weights),
        "buffers": frozen(buffers),
        "slots": {k: _slots(o, names) for k, o in optimizers.items()},
        "groups": {k: _groups(o, names) for k, o in optimizers.items()},
        "state": {k: frozen(_state_of(v)) for k, v in state.items()},
    }


def random_states() -> str:
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes())
    return hashlib.sha256(pickle.dumps(states)).hexdigest()[:16]


def _slots(optimizer: Any, names: dict[int, str]) -> dict[str, Any]:
    """A state that holds nothing is no state: asking for it makes it."""
    return {
        names.get(id(owner), "a tensor of no model")
        if isinstance(owner, torch.Tensor)
        else repr(owner): frozen(v)
        for owner, v in optimizer.state.items()
        if not (isinstance(v, dict) and not v)
    }


def _groups(optimizer: Any, names: dict[int, str]) -> list[Any]:
    return [
        {k: [names.get(id(p)) for p in v] if k == "params" else frozen(v) for k, v in group.items()}
        for group in optimizer.param_groups
    ]


def _state_of(member: Any) -> Any:
    if isinstance(member, dict):
        return member
    if hasattr(
        member, "next_iter_state"
    ):  # asking such a loader makes an iterator: its batches show
        return None
    return member.state_dict()


def frozen(value: Any) -> Any:
    """As `freeze`, telling apart what compares equal: containers by their type, arrays by their fields."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value.coalesce().to_dense()
        if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
            return ("not made yet",)
        return freeze(value.detach().resolve_conj().resolve_neg())
    if isinstance(value, np.ndarray | np.generic) and value.dtype.names:
        return ("numpy", repr(value.dtype), value.shape, value.tobytes())
    if isinstance(value, Mapping):
        pairs = {_key(k): frozen(v) for k, v in value.items()}
        return pairs if type(value) is dict else [type(value).__name__, pairs]
    if isinstance(value, collections.deque):
        return ["deque", value.maxlen, *map(frozen, value)]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, *sorted(map(repr, value))]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(frozen, value)]
    if callable(value):
        return ("callable",)
    return freeze(value)


def _key(key: Any) -> str:
    return f"{type(key).__name__} {key!r}"
