"""User state to bytes and back: a closed, tagged set of types, no pickle.

Scalars, strings, bytes and lists stand for themselves in msgpack; everything else is a map with one
key, its tag. A plain map never occurs, so nothing is ambiguous: tuples stay tuples, and a Counter
comes back as a Counter. Tensors belong to the caller's framework and pass through an adapter.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from reprlib import Repr
from typing import Any

import msgspec

from everystep.errors import CorruptData, UnsupportedState
from everystep.format.arrays import array_to_plain, plain_to_array
from everystep.format.unstorable import Unstorable
from everystep.text import full_name

Pack = Callable[[Any], tuple[str, Any] | None]
"""Turns a foreign value into (tag, plain payload), or None if it does not know the type."""
Unpack = Callable[[str, Any], Any]
"""Turns (tag, payload) back; raises KeyError for a tag it does not know."""

_PLAIN = (type(None), bool, float, bytes)
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_DEPTH_MAX = 64
_ALIKE_MAX = 100  # keys of one dict or set whose hashes are equal
_SHOWN = 200  # characters of a path
_HINT = (
    "return plain containers, numbers, strings, bytes, numpy arrays or tensors from state_dict()"
)
_HINTS = {
    "numpy.random.": "store its state: rng.bit_generator.state, or rng.get_state() of a RandomState",
    "random.Random": "store its state: rng.getstate()",
    "torch._C.Generator": "store its state: generator.get_state()",
}
_MALFORMED = (
    msgspec.DecodeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    OverflowError,
    RuntimeError,  # of a framework that is asked for a device it does not know; and RecursionError
    MemoryError,
)
_repr = Repr()
_repr.maxstring = _repr.maxother = _SHOWN


def no_foreign(value: Any) -> tuple[str, Any] | None:
    return None


def as_raw(tag: str, payload: Any) -> Any:
    """Unpack for readers without a framework: a tensor is shown as its tag and payload. What may be a key
    stays one: of a type that is not there, a shape is a list of sizes."""
    return (tag, tuple(payload) if tag == "size" else payload)


def shown(key: object) -> str:
    """A key as a path names it; a `repr` that fails or has no end does no harm."""
    return _repr.repr(key)


def encode(value: Any, where: str, pack: Pack = no_foreign) -> bytes:
    """Bytes of `value`; an unsupported type is refused with its path, which starts at `where`."""
    return msgspec.msgpack.encode(to_plain(value, where, pack))


def encode_dict(members: Mapping[str, Any]) -> bytes:
    """Bytes of a dict whose values `to_plain` has made already, each with a path of its own."""
    return encode_plain({"dict": [[name, plain] for name, plain in members.items()]})


def encode_plain(plain: Any) -> bytes:
    """Bytes of what `to_plain` gave."""
    return msgspec.msgpack.encode(plain)


def to_plain(value: Any, where: str, pack: Pack = no_foreign) -> Any:
    """What stands for `value` in msgpack."""
    try:
        return _to_plain(value, pack, 0)
    except Unstorable as refused:
        path = where + refused.path
        path = path if len(path) <= _SHOWN else f"{path[:_SHOWN]}…"
        raise UnsupportedState(f"{path}: {refused.words}", hint=refused.hint) from None


def decode(data: bytes, unpack: Unpack = as_raw) -> Any:
    try:
        return _from_plain(msgspec.msgpack.decode(data), unpack)
    except _MALFORMED as error:
        raise CorruptData(f"decode user state of {len(data)} bytes: {error}") from error


def decode_dict(data: bytes, unpack: Unpack = as_raw) -> dict[Any, Any]:
    found = decode(data, unpack)
    if not isinstance(found, dict):
        raise CorruptData(f"decode slots of {len(data)} bytes: a {type(found).__name__}, no dict")
    return found


def keys_of(data: bytes) -> list[str]:
    """The text keys of an encoded dict; what its values hold is not looked at."""
    return [key for key, _ in _pairs_of(data) if isinstance(key, str)]


def without(data: bytes, key: str) -> bytes:
    """An encoded dict without one of its text keys."""
    kept = [pair for pair in _pairs_of(data) if pair[0] != key]
    return msgspec.msgpack.encode({"dict": kept})


def _pairs_of(data: bytes) -> list[list[Any]]:
    try:
        pairs: list[list[Any]] = msgspec.msgpack.decode(data)["dict"]
        return pairs
    except _MALFORMED as error:
        raise CorruptData(f"decode a dict of {len(data)} bytes: {error}") from error


def _to_plain(value: Any, pack: Pack, depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise Unstorable(
            f"nested deeper than {_DEPTH_MAX} levels, or refers to itself",
            "store a flatter structure: a tree, without references back",
        )
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        return value if _INT_MIN <= value <= _INT_MAX else {"int": str(value)}
    if kind is str:
        return value if value.isascii() else _text(value)
    if kind is list:
        return _items(value, pack, depth)
    # containers are copied before they are walked over: a thread may still change them
    if kind in (dict, OrderedDict, Counter):
        tag = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}[kind]
        return {tag: [_pair(k, v, pack, depth) for k, v in list(value.items())]}
    if kind is tuple:
        return {"tuple": _items(value, pack, depth)}
    if kind in (set, frozenset):
        return {kind.__name__: _items(list(value), _for_keys(pack), depth)}
    if kind is deque:
        return {"deque": [value.maxlen, _items(list(value), pack, depth)]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": [_to_plain(n, pack, depth) for n in (value.start, value.stop, value.step)]}
    packed = array_to_plain(value) or pack(value)
    if packed is None:
        name = full_name(kind)
        hints = (hint for start, hint in _HINTS.items() if name.startswith(start))
        raise Unstorable(f"type {name} cannot be stored", next(hints, _HINT))
    return {packed[0]: packed[1]}


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a pair: Python's strings may hold one, UTF-8 may not
        return {"text": value.encode("utf-8", "surrogatepass")}
    return value


def _items(members: Iterable[Any], pack: Pack, depth: int) -> list[Any]:
    found: list[Any] = []
    for member in list(members):
        try:
            found.append(_to_plain(member, pack, depth + 1))
        except Unstorable as refused:
            refused.within(f"[{len(found)}]")
            raise
    return found


def _pair(key: Any, value: Any, pack: Pack, depth: int) -> list[Any]:
    try:
        return [
            _to_plain(key, _for_keys(pack), depth + 1),
            _to_plain(value, pack, depth + 1),
        ]
    except Unstorable as refused:
        refused.within(f"[{shown(key)}]")
        raise


def _check_apart(keys: list[Any]) -> None:
    """Keys of one hash are compared each with each: of numbers anybody can find as many as there are."""
    if len(keys) > _ALIKE_MAX:
        alike = max(Counter(map(hash, keys)).values())
        if alike > _ALIKE_MAX:
            raise ValueError(f"{alike} keys of one hash, expected at most {_ALIKE_MAX}")


def _for_keys(pack: Pack) -> Pack:
    def pack_key(value: Any) -> tuple[str, Any] | None:
        packed = pack(value)
        if packed is not None and packed[0] == "tensor":  # equal to itself alone, and to no copy
            raise Unstorable(
                "a tensor as a key cannot be stored", "use a name or a number as the key"
            )
        return packed

    return pack_key


def _from_plain(plain: Any, unpack: Unpack) -> Any:
    if isinstance(plain, list):
        return [_from_plain(v, unpack) for v in plain]
    if not isinstance(plain, dict):
        return plain
    ((tag, body),) = plain.items()
    if tag in ("dict", "ordered", "counter"):
        pairs = [(_from_plain(k, unpack), _from_plain(v, unpack)) for k, v in body]
        _check_apart([key for key, _ in pairs])
        kinds: dict[str, Any] = {"dict": dict, "ordered": OrderedDict}
        return Counter(dict(pairs)) if tag == "counter" else kinds[tag](pairs)
    if tag == "tuple":
        return tuple(_from_plain(v, unpack) for v in body)
    if tag in ("set", "frozenset"):
        members = [_from_plain(v, unpack) for v in body]
        _check_apart(members)
        return set(members) if tag == "set" else frozenset(members)
    if tag == "deque":
        return deque((_from_plain(v, unpack) for v in body[1]), maxlen=body[0])
    if tag == "int":
        return int(body)
    if tag == "text":
        return body.decode("utf-8", "surrogatepass")
    if tag == "complex":
        return complex(*body)
    if tag == "range":
        return range(*(_from_plain(n, unpack) for n in body))
    if tag in ("ndarray", "npscalar"):
        return plain_to_array(tag, body)
    return unpack(tag, body)
