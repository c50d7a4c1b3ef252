"""The closure that a caller of `optimizer.step` may give, as a pre-hook sees it among the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """`args` begins with the optimizer."""
    found: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found


def with_work_after(
    closure: Callable[[], Any],
    work: Callable[[], object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Arguments:
    """The arguments with a closure that does `work` too, when gradients are there."""

    def closure_then_work() -> Any:
        result = closure()
        work()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure_then_work}
    return (args[0], closure_then_work, *args[2:]), kwargs
