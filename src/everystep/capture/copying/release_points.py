"""Where training gives gradients' memory back: hooks before a few modules, and one behind each whole forward.

Inside a compiled graph no hook runs. What is compiled is hooked from outside: before it, and behind the
outermost module, when the forward is done and backward has not begun.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

_BEFORE_MODULES_MAX = 8
POINTS_MAX = _BEFORE_MODULES_MAX + 1


def release_points(models: Iterable[torch.nn.Module], point: Callable[[], None]) -> list[Any]:
    """Have `point` called there; returns handles that remove it."""

    def at_module(*_: object) -> None:
        if not torch.compiler.is_compiling():
            point()

    given = list(models)
    handles: list[Any] = [m.register_forward_pre_hook(at_module) for m in _before(given)]
    for model in given:
        if model._compiled_call_impl is None:
            handles.append(model.register_forward_hook(at_module))
        else:
            handles.append(_BehindCompiledCall(model, point))
    return handles


def points_outside(models: Iterable[torch.nn.Module], point: Callable[[], None]) -> list[Any]:
    """The same for wrappers that `torch.compile` made of the models after, or beside, what was given."""
    given = set(map(id, models))
    wrappers = [o for o in gc.get_objects() if type(o).__name__ == "OptimizedModule"]
    return [
        wrapper.register_forward_hook(lambda *_: point())
        for wrapper in wrappers
        if id(wrapper._orig_mod) in given
    ]


class _BehindCompiledCall:
    """`module.compile()` compiles the call with its hooks: only what calls it is outside."""

    def __init__(self, module: torch.nn.Module, point: Callable[[], None]) -> None:
        compiled: Any = module._compiled_call_impl
        self._module, self._compiled = module, compiled

        def call_then_point(*args: Any, **kwargs: Any) -> Any:
            result = compiled(*args, **kwargs)
            point()
            return result

        self._ours = module._compiled_call_impl = call_then_point

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._ours:  # unless it was compiled again since
            self._module._compiled_call_impl = self._compiled


def _before(models: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules spread over a forward; none inside compiled code, where a hook would break the graph."""
    found: dict[int, torch.nn.Module] = {}

    def visit(module: torch.nn.Module) -> None:
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if next(module.parameters(recurse=False), None) is not None or compiled:
            found.setdefault(id(module), module)
        if not compiled:
            for child in module.children():
                visit(child)

    for model in models:
        visit(model)
    owners = list(found.values())
    if len(owners) <= _BEFORE_MODULES_MAX:
        return owners
    last = len(owners) - 1
    return [owners[i * last // (_BEFORE_MODULES_MAX - 1)] for i in range(_BEFORE_MODULES_MAX)]
