"""Finds the first kept step at which something is wrong, on the way that training went."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from everystep.errors import UsageError
from everystep.format.arrays import widen_bfloat16
from everystep.store.reader import StoredRun

if TYPE_CHECKING:
    import numpy as np

Tensors = Mapping[str, "np.ndarray"]
Metric = Callable[[Tensors], str]
"""What is wrong with a step, in words; empty if nothing is."""
_FORMS = "nonfinite, max-abs=LIMIT, norm=LIMIT, or module:function of the tensors by name"


class BadStep(NamedTuple):
    bad: int | None  # the first bad step, None if even the newest is good
    good: int | None  # the newest good one before it
    why: str
    looked_at: list[int]


def first_bad_step(run: StoredRun, metric: Metric) -> BadStep:
    """By halving: once a step is bad, the ones after it are taken to be bad too."""
    steps, looked_at = run.steps, []
    reasons: dict[int, str] = {}

    def is_bad(place: int) -> bool:
        step = steps[place]
        looked_at.append(step)
        reasons[step] = metric(as_floats(run, step))
        return bool(reasons[step])

    good, bad = -1, len(steps)
    if steps and is_bad(len(steps) - 1):
        bad = len(steps) - 1
        while bad - good > 1:
            middle = (good + bad) // 2
            if is_bad(middle):
                bad = middle
            else:
                good = middle
    elif steps:
        good = len(steps) - 1
    found = steps[bad] if bad < len(steps) else None
    why = reasons[found] if found is not None else ""
    return BadStep(found, steps[good] if good >= 0 else None, why, looked_at)


def as_floats(run: StoredRun, step: int) -> dict[str, np.ndarray]:
    """The tensors of a step; those of bfloat16 widened, which changes no value."""
    import numpy as np

    base = run.base(step)
    narrow = {base.census.atoms[t.atom].name for t in base.tensors if t.dtype == "bfloat16"}
    found = run.tensors(step)
    return {
        name: widen_bfloat16(array)
        if name.partition(":")[0] in narrow and array.dtype == np.uint16
        else array
        for name, array in found.items()
    }


def metric_of(words: str) -> Metric:
    """A metric by name, with a limit, or the user's own function."""
    name, _, limit = words.partition("=")
    if words == "nonfinite":
        return _nonfinite
    if name in ("max-abs", "norm"):
        try:
            return _beyond(name, float(limit))
        except ValueError:
            raise UsageError(f"bisect: {words!r} has no limit", hint=f"one of {_FORMS}") from None
    if ":" in words:
        return _own(words)
    raise UsageError(f"bisect: no metric {words!r}", hint=f"one of {_FORMS}")


def _nonfinite(tensors: Tensors) -> str:
    import numpy as np

    for name, array in tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"{name}: {int((~np.isfinite(array)).sum())} of {array.size} are not finite"
    return ""


def _beyond(name: str, limit: float) -> Metric:
    import numpy as np

    def metric(tensors: Tensors) -> str:
        for tensor, array in tensors.items():
            if array.dtype.kind != "f" or not array.size:
                continue
            wide = array.astype(np.float64).ravel()
            value = math.sqrt(float(wide @ wide)) if name == "norm" else float(np.abs(wide).max())
            if not value <= limit:  # NaN is beyond every limit
                return f"{tensor}: {name} is {value:g}, the limit {limit:g}"
        return ""

    return metric


def _own(words: str) -> Metric:
    module, _, name = words.partition(":")
    try:
        predicate = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"bisect: {words}: {error}", hint=f"one of {_FORMS}") from error

    def metric(tensors: Tensors) -> str:
        verdict = predicate(tensors)
        return str(verdict) if isinstance(verdict, str) else f"{words} says so" if verdict else ""

    return metric
