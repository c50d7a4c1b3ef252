"""What a state may hold of torch, held against itself without torch: who verifies a store finds what loading
it would refuse. No name is looked up anywhere; it is one of these, or it is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from everystep.core.dtypes import ELEMENT_TYPES, NAMED_TYPES, tensor_bytes
from everystep.format.values import as_raw

_DEVICE = re.compile(r"[a-z]{1,20}(:\d{1,4})?")


def check(tag: str, payload: Any) -> None:
    """ValueError if a payload is not what its tag says; KeyError for a tag that nobody knows."""
    _CHECKS[tag](payload)


def checked_raw(tag: str, payload: Any) -> Any:
    """Unpack for whoever verifies: checked, and shown as it is."""
    check(tag, payload)
    return as_raw(tag, payload)


def _tensor(payload: Any) -> None:
    name, shape, data, device = payload
    if name not in ELEMENT_TYPES:
        raise ValueError(f"a tensor of element type {name!r}")
    _sizes(shape)
    if not isinstance(data, bytes) or len(data) != tensor_bytes(name, shape):
        raise ValueError(f"{len(data)} bytes for a tensor {name}{shape}")
    _device(device)


def _sizes(payload: Any) -> None:
    whole = all(type(size) is int and size >= 0 for size in payload)
    if not isinstance(payload, list) or not whole or math.prod(payload) >= 1 << 63:
        raise ValueError(f"a shape {payload!r}")


def _dtype(payload: Any) -> None:
    if payload not in NAMED_TYPES:
        raise ValueError(f"an element type {payload!r}")


def _device(payload: Any) -> None:
    if not isinstance(payload, str) or not _DEVICE.fullmatch(payload):
        raise ValueError(f"a device {payload!r}")


_CHECKS: dict[str, Callable[[Any], None]] = {
    "tensor": _tensor,
    "size": _sizes,
    "dtype": _dtype,
    "device": _device,
}
