"""What frameworks wrap around an optimizer, a scheduler or a model, taken off in one place.

A wrapper is taken off only if it is known to hold no state of its own: a Lookahead has slow weights, and who
records only the optimizer inside it resumes with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everystep.errors import UsageError
from everystep.text import full_name

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
_INSIDE = {  # where a framework's wrapper keeps what it wraps, by the name of its class
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
    "_FabricModule": "_original_module",
}


def by_key(given: Any) -> dict[str, Any]:
    """One model or optimizer, or several by their keys, without wrappers."""
    named = given if isinstance(given, Mapping) else {"": given}
    return {key: unwrap(value) for key, value in named.items()}


def unwrap(given: Any) -> Any:
    """The object inside the wrappers of frameworks."""
    for kind in type(given).__mro__:
        if kind.__name__ in _INSIDE and kind.__module__.partition(".")[0] in _FRAMEWORKS:
            return unwrap(getattr(given, _INSIDE[kind.__name__]))
    return given


def check_given(optimizers: Mapping[str, Any]) -> None:
    """Refuse what is no optimizer, and an optimizer that holds another one which was not given."""
    given = {id(optimizer) for optimizer in optimizers.values()}
    for key, optimizer in optimizers.items():
        called = f"optimizer {key!r}" if key else "the optimizer"
        inner = [
            (at, o) for at, o in _held(optimizer) if id(o) not in given and _is_apart(o, optimizer)
        ]
        if not isinstance(optimizer, torch.optim.Optimizer):
            where, inside = inner[0] if inner else ("", None)
            raise UsageError(
                f"attach: {called} is a {_kind(optimizer)}, expected a torch.optim.Optimizer",
                hint=f"it holds a {_kind(inside)} in {where}: give that, and what {type(optimizer).__name__} "
                "itself remembers in state"
                if inner
                else None,
            )
        if inner:
            where, inside = inner[0]
            raise UsageError(
                f"attach: {called} is a {_kind(optimizer)} that holds a {_kind(inside)} in {where}, which "
                "was not given: its state would not be recorded",
                hint=f'give both, as a dict: {{"outer": optimizer, "inner": optimizer{where}}}',
            )


def _is_apart(inner: torch.optim.Optimizer, owner: Any) -> bool:
    """A wrapper that shares the state of what it wraps needs no second name for it."""
    return inner.state is not getattr(owner, "state", None)


def _held(owner: Any) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Optimizers in the attributes of an object, in their lists and dicts too, and how to reach them."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, torch.optim.Optimizer):
            yield f".{name}", value
        items: Any = ()
        if isinstance(value, list | tuple):
            items = enumerate(value)
        elif isinstance(value, dict):
            items = value.items()
        for key, item in items:
            if isinstance(item, torch.optim.Optimizer):
                yield f".{name}[{key!r}]", item


def _kind(value: object) -> str:
    return full_name(type(value))
