"""Two states, compared bit for bit: types, shapes and every byte, NaN included."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

_SHOWN = 12


def freeze(value: Any) -> Any:
    """A copy of a state made of plain values that `==` compares by their bits."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = plain.view(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", str(value.dtype), tuple(value.shape), data)
    if isinstance(value, np.ndarray | np.generic):
        return ("numpy", type(value).__name__, repr(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: freeze(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(freeze(member) for member in value)]
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    return (type(value).__name__, repr(value))


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Where two frozen states differ, by path; the first dozen."""
    if isinstance(expected, dict) and isinstance(found, dict):
        lines = [f"{path}[{k!r}]: missing" for k in expected if k not in found]
        lines += [f"{path}[{k!r}]: unexpected" for k in found if k not in expected]
        both = [k for k in expected if k in found]
        lines += [d for k in both for d in differences(expected[k], found[k], f"{path}[{k!r}]")]
        return lines[:_SHOWN]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        lines = [d for i, (a, b) in pairs for d in differences(a, b, f"{path}[{i - 1}]")]
        return lines[:_SHOWN]
    if expected == found:
        return []
    return [f"{path}: expected {_short(expected)}, found {_short(found)}"]


def same(expected: Any, found: Any, what: str) -> None:
    """Fail with the places where two frozen states differ."""
    lines = differences(expected, found, what)
    assert not lines, f"{what}: not the same bits\n  " + "\n  ".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, tuple) and value[0] == "tensor":
        return f"{value[1]}{list(value[2])} 0x{value[3][:8].hex()}…"
    return str(value)[:80]
