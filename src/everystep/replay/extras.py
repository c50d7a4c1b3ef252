"""What an optimizer holds beside its param groups and slots, put back into a live one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch

from everystep.errors import CorruptData, UnsupportedState
from everystep.format import values
from everystep.replay.optimizers import attributes_of, why_no_state
from everystep.replay.tensors import pack


def set_other_state(
    optimizer: torch.optim.Optimizer, logged: Sequence[tuple[int, Any, Any]]
) -> None:
    """What `optimizer.state` held under keys that are no parameters, each at its place among the others."""
    live = list(optimizer.state.items())
    entries = [entry for entry in live if isinstance(entry[0], torch.Tensor)]
    if not logged and len(entries) == len(live):
        return
    others = {key: value for key, value in live if not isinstance(key, torch.Tensor)}
    for place, key, value in logged:
        entries.insert(place, (key, _into(others.get(key), value)))
    optimizer.state.clear()
    optimizer.state.update(entries)


def check_attributes(optimizer: torch.optim.Optimizer, logged: Iterable[object]) -> None:
    """Refuse what is not recorded either."""
    for name in logged:
        if reason := why_no_state(optimizer, name):
            raise CorruptData(f"attribute {name!r} of a {type(optimizer).__name__}: {reason}")


def set_attributes(
    optimizer: torch.optim.Optimizer, logged: dict[str, Any], unrecorded: Set[str]
) -> None:
    """Attributes that a step made since then go; what is code stays as the user has built it."""
    live = attributes_of(optimizer)
    check_attributes(optimizer, logged)
    for name in live.keys() - logged.keys() - unrecorded:
        if _is_storable(live[name]):
            del vars(optimizer)[name]
    for name, value in logged.items():
        vars(optimizer)[name] = _into(live.get(name), value)


def _into(live: Any, value: Any) -> Any:
    """`value`, inside the containers that are there already: others may hold references to them."""
    if type(live) is not type(value) or live is None:
        return value
    if type(live) is dict:
        merged = {k: _into(live.get(k), v) for k, v in value.items()}
        live.clear()
        live.update(merged)
        return live
    if type(live) is list:
        known = [*live, *[None] * len(value)]
        live[:] = [_into(was, now) for was, now in zip(known, value, strict=False)]
        return live
    return value


def _is_storable(value: Any) -> bool:
    try:
        values.to_plain(value, "", pack)
    except UnsupportedState:
        return False
    return True
