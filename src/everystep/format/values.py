"""User state to bytes and back: a closed, tagged set of types, no pickle.

Scalars, strings, bytes and lists stand for themselves in msgpack; everything else is a map with one
key, its tag. A plain map never occurs, so nothing is ambiguous: tuples stay tuples, and a Counter
comes back as a Counter. Tensors belong to the caller's framework and pass through an adapter.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from everystep.errors import CorruptData, UnsupportedState

Pack = Callable[[Any], tuple[str, Any] | None]
"""Turns a foreign value into (tag, plain payload), or None if it does not know the type."""
Unpack = Callable[[str, Any], Any]
"""Turns (tag, payload) back; raises KeyError for a tag it does not know."""

_PLAIN = (type(None), bool, float, str, bytes)
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_DEPTH_MAX = 64
_MALFORMED = (
    msgspec.DecodeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def no_foreign(value: Any) -> tuple[str, Any] | None:
    return None


def as_raw(tag: str, payload: Any) -> Any:
    """Unpack for readers without a framework: a tensor is shown as its tag and payload."""
    return (tag, payload)


def encode(value: Any, where: str, pack: Pack = no_foreign) -> bytes:
    """Bytes of `value`; an unsupported type is refused with its path, which starts at `where`."""
    return msgspec.msgpack.encode(_to_plain(value, where, pack, 0))


def decode(data: bytes, unpack: Unpack = as_raw) -> Any:
    try:
        return _from_plain(msgspec.msgpack.decode(data), unpack)
    except _MALFORMED as error:
        raise CorruptData(f"decode user state of {len(data)} bytes: {error}") from error


def _to_plain(value: Any, where: str, pack: Pack, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise UnsupportedState(
            f"{where}: nested deeper than {_DEPTH_MAX} levels, or refers to itself"
        )
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else {"int": str(value)}
    if kind is list:
        return _items(value, where, pack, depth)
    if kind in (dict, OrderedDict, Counter):
        tag = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}[kind]
        return {tag: [_pair(k, v, where, pack, depth) for k, v in value.items()]}
    if kind is tuple:
        return {"tuple": _items(value, where, pack, depth)}
    if kind in (set, frozenset):
        return {kind.__name__: _items(list(value), where, pack, depth)}
    if kind is deque:
        return {"deque": [value.maxlen, _items(list(value), where, pack, depth)]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if kind.__module__ == "numpy":
        return _numpy_to_plain(value, where)
    packed = pack(value)
    if packed is None:
        raise UnsupportedState(
            f"{where}: type {kind.__module__}.{kind.__qualname__} cannot be stored",
            hint="return plain containers, numbers, strings, bytes, numpy arrays or tensors "
            "from state_dict()",
        )
    return {packed[0]: packed[1]}


def _items(values: Any, where: str, pack: Pack, depth: int) -> list[Any]:
    return [_to_plain(v, f"{where}[{i}]", pack, depth + 1) for i, v in enumerate(values)]


def _pair(key: Any, value: Any, where: str, pack: Pack, depth: int) -> list[Any]:
    inner = f"{where}[{key!r}]"
    return [_to_plain(key, inner, pack, depth + 1), _to_plain(value, inner, pack, depth + 1)]


def _numpy_to_plain(value: Any, where: str) -> Any:
    import numpy as np  # only when numpy values are there: the shadow starts without it

    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        tag = "ndarray" if isinstance(value, np.ndarray) else "npscalar"
        return {tag: [value.dtype.str, list(value.shape), value.tobytes()]}
    raise UnsupportedState(
        f"{where}: numpy value of type {type(value).__qualname__} cannot be stored"
    )


def _numpy_from_plain(tag: str, payload: Any) -> Any:
    import numpy as np

    dtype, shape, data = payload
    array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
    return array if tag == "ndarray" else array[()]


def _from_plain(plain: Any, unpack: Unpack) -> Any:
    if isinstance(plain, list):
        return [_from_plain(v, unpack) for v in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, body),) = plain.items()
    if tag in ("dict", "ordered", "counter"):
        pairs = [(_from_plain(k, unpack), _from_plain(v, unpack)) for k, v in body]
        kinds: dict[str, Any] = {"dict": dict, "ordered": OrderedDict}
        return Counter(dict(pairs)) if tag == "counter" else kinds[tag](pairs)
    if tag in ("tuple", "set", "frozenset"):
        sequence = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]
        return sequence(_from_plain(v, unpack) for v in body)
    if tag == "deque":
        return deque((_from_plain(v, unpack) for v in body[1]), maxlen=body[0])
    if tag == "int":
        return int(body)
    if tag == "complex":
        return complex(*body)
    if tag == "range":
        return range(*body)
    if tag in ("ndarray", "npscalar"):
        return _numpy_from_plain(tag, body)
    return unpack(tag, body)
