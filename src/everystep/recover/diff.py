"""How far two steps of a run are apart, atom by atom. Reads a few megabytes at a time, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from everystep.core.dtypes import ELEMENT_TYPES
from everystep.core.tensors import Held
from everystep.format.arrays import widen_bfloat16
from everystep.recover.state import State

_ELEMENTS = 1 << 20  # compared at a time


class Difference(msgspec.Struct, frozen=True):
    """Of one tensor; sizes are those of the elements as float64. Norms are Euclidean."""

    name: str
    changed: bool
    note: str = ""  # why nothing could be compared
    max_change: float = 0.0
    change_norm: float = 0.0
    norm_before: float = 0.0
    norm_after: float = 0.0

    @property
    def relative_change(self) -> float | None:
        """The norm of the change against the norm before; None: there was nothing before."""
        return self.change_norm / self.norm_before if self.norm_before else None


def compare(before: State, after: State, *, slots: bool) -> Iterator[Difference]:
    """Atoms in the order of the model, then those that only one of the two has."""
    old = {(before.name(t), t.slot): t for t in before.tensors() if slots or not t.slot}
    new = {(after.name(t), t.slot): t for t in after.tensors() if slots or not t.slot}
    for key in dict.fromkeys((*old, *new)):
        name = f"{key[0]}:{key[1].strip('/')}" if key[1] else key[0]
        yield _difference(name, old.get(key), new.get(key))


def total(differences: list[Difference]) -> Difference:
    """Everything that could be compared, as if it were one tensor."""
    both = [d for d in differences if not d.note]

    def norm(name: str) -> float:
        return math.sqrt(sum(getattr(d, name) ** 2 for d in both))

    return Difference(
        "total",
        any(d.changed for d in differences),
        max_change=_largest([d.max_change for d in both]),
        change_norm=norm("change_norm"),
        norm_before=norm("norm_before"),
        norm_after=norm("norm_after"),
    )


def _difference(name: str, old: Held | None, new: Held | None) -> Difference:
    if old is None or new is None:
        return Difference(name, True, "only in B" if old is None else "only in A")
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        told = " and ".join(f"{t.dtype}{list(t.shape)}" for t in (old, new))
        return Difference(name, True, f"{told} cannot be compared")
    changed, largest, squares = False, 0.0, np.zeros(3)
    with np.errstate(all="ignore"):  # infinities and NaN may meet here: they show in the result
        for one, other in zip(_parts(old), _parts(new), strict=True):
            changed = changed or not np.array_equal(np.asarray(one), np.asarray(other))
            a, b = widen(one, old.dtype), widen(other, new.dtype)
            # equal infinities are no change
            apart = np.where(a == b, 0.0, np.abs(b - a))
            largest = _largest([largest, float(apart.max(initial=0.0))])
            squares += [float(np.vdot(v, v).real) for v in (apart, a, b)]
    return Difference(name, changed, "", largest, *(math.sqrt(s) for s in squares))


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _parts(tensor: Held) -> Iterator[memoryview]:
    size = _ELEMENTS * ELEMENT_TYPES[tensor.dtype].bytes
    for at in range(0, len(tensor.data), size):
        yield tensor.data[at : at + size]


def widen(data: memoryview, dtype: str) -> np.ndarray:
    """Elements as float64 (complex128), which changes no value but those of huge integers."""
    if dtype == "bfloat16":
        single: np.ndarray = widen_bfloat16(np.frombuffer(data, np.uint16))
        return single.astype(np.float64)
    if dtype == "float8_e5m2":  # the upper half of a float16
        halves = np.frombuffer(data, np.uint8).astype(np.uint16) << 8
        return halves.view(np.float16).astype(np.float64)
    if dtype == "float8_e4m3fn":
        return _E4M3[np.frombuffer(data, np.uint8)]
    kind = np.dtype(dtype)
    wide = np.complex128 if kind.kind == "c" else np.float64
    return np.frombuffer(data, kind).astype(wide)


def _e4m3_values() -> np.ndarray:
    """Every float8_e4m3fn: no infinities, and NaN where all bits but the sign are set."""
    codes = np.arange(256)
    exponents, fractions = codes >> 3 & 15, (codes & 7) / 8
    values = np.where(exponents > 0, (1 + fractions) * 2.0 ** (exponents - 7), fractions * 2.0**-6)
    values[codes & 127 == 127] = np.nan
    return np.where(codes > 127, -values, values)


_E4M3 = _e4m3_values()
