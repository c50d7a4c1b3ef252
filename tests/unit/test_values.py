"""User state: what goes in comes out with its types; what cannot be stored is refused by its path."""

from __future__ import annotations

import contextlib
import math
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.errors import CorruptData, UnsupportedState
from everystep.format import values

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
)
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=20,
)


def same(one: object, other: object) -> bool:
    """Equal with types, and NaN equal to the same NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return same(list(one.items()), list(other.items()))
    return one == other


@given(trees | st.integers())
def test_round_trip(tree: object) -> None:
    assert same(values.decode(values.encode(tree, "state")), tree)


def test_random_state_of_python_survives() -> None:
    import random

    state = random.getstate()
    restored = values.decode(values.encode(state, "state"))
    random.setstate(restored)
    assert restored == state


@pytest.mark.parametrize(
    "state, path",
    [
        ({"loader": {"fn": len}}, "state['loader']['fn']"),
        ({"a": [1, (2, object())]}, "state['a'][1][1]"),
        ({"k": {object: 1}}, "state['k']"),
    ],
)
def test_refused_by_path(state: object, path: str) -> None:
    with pytest.raises(UnsupportedState) as refusal:
        values.encode(state, "state")
    assert path in str(refusal.value)
    assert refusal.value.hint


def test_self_reference_is_refused_not_followed() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="nested deeper"):
        values.encode(loop, "state")


tags = ["dict", "tuple", "deque", "int", "complex", "range", "ndarray", "npscalar", "nonsense"]
lies = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(tags), inner, max_size=2),
)


@given(st.binary(max_size=200) | lies.map(msgspec.msgpack.encode))
def test_garbage_never_gives_anything_but_a_clear_error(data: bytes) -> None:
    with contextlib.suppress(CorruptData):
        values.decode(data)


def test_negative_zero_and_nan_keep_their_bits() -> None:
    back = values.decode(values.encode([-0.0, math.nan, math.inf], "state"))
    assert math.copysign(1, back[0]) == -1 and math.isnan(back[1]) and back[2] == math.inf
