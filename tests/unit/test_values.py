"""User state: what goes in comes out with its types; what cannot be stored is refused by its path."""

from __future__ import annotations

import contextlib
import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from everystep.errors import CorruptData, UnsupportedState
from everystep.format import values

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters())  # halves of pairs too
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


SCALARS = npst.scalar_dtypes() | npst.byte_string_dtypes() | npst.unicode_string_dtypes()
DTYPES = SCALARS | npst.nested_dtypes(subtype_strategy=SCALARS)


@given(
    npst.arrays(DTYPES, npst.array_shapes(min_dims=0, min_side=0, max_side=3)),
    st.sampled_from("CF"),
    st.booleans(),
)
def test_arrays_of_any_dtype(array: np.ndarray, order: Any, aligned: bool) -> None:
    """Fields with their names, offsets and titles; the order in memory too."""
    if array.dtype.names:
        array = array.astype(np.dtype(array.dtype.descr, align=aligned))
    array = array.copy(order)
    back = values.decode(values.encode({"a": [array]}, "state"))["a"][0]
    assert type(back) is np.ndarray and back.dtype == array.dtype
    assert back.dtype.isalignedstruct == array.dtype.isalignedstruct
    assert (back.shape, back.tobytes()) == (array.shape, array.tobytes())
    assert back.flags.f_contiguous == array.flags.f_contiguous and back.flags.owndata
    if array.size:  # a single one of them, as a scalar
        scalar = array[(0,) * array.ndim]
        single = values.decode(values.encode(scalar, "state"))
        assert type(single) is type(scalar) and single.tobytes() == scalar.tobytes()


def test_fields_that_overlap_titles_and_records() -> None:
    layouts: list[Any] = [
        {"names": ["x", "y"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 9},
        {"names": ["y", "x"], "formats": ["i4", "i2"], "offsets": [4, 0]},
        [(("a title", "x"), ">u2"), ("inner", [("deep", "M8[ns]", (2, 1))])],
        (np.record, [("x", "f4")]),
    ]
    for layout in layouts:
        dtype = np.dtype(layout)
        array = np.frombuffer(bytes(range(2 * dtype.itemsize)), dtype)
        back = values.decode(values.encode(array, "state"))
        assert back.dtype == dtype and back.dtype.type is dtype.type, dtype
        assert back.dtype.fields == dtype.fields and back.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([object()]), "Python objects"),
        (np.zeros(1, [("a", "O")]), "Python objects"),
        (np.matrix([[1]]), "matrix"),
        (np.random.default_rng(), "bit_generator.state"),
        (np.random.RandomState(), "get_state()"),
    ],
)
def test_numpy_values_that_are_refused(value: Any, words: str) -> None:
    with pytest.raises(UnsupportedState, match=r"state\['a'\]\[0\]: ") as refusal:
        values.encode({"a": [value]}, "state")
    assert words in str(refusal.value)


def test_a_container_that_a_thread_changes_meanwhile() -> None:
    """Each container is copied before it is walked over."""

    class Grows:
        pass

    state: dict[Any, Any] = {"first": Grows(), "then": 1}

    def pack(value: Any) -> tuple[str, Any] | None:
        state[len(state)] = "more"
        return "grows", None

    assert len(values.decode(values.encode(state, "state", pack))) == 2


def test_a_dict_without_one_of_its_keys() -> None:
    data = values.encode({"a": 1, "b": (2,), 3: 4}, "slots")
    assert values.keys_of(data) == ["a", "b"]
    assert values.decode(values.without(data, "a")) == {"b": (2,), 3: 4}


def test_negative_zero_and_nan_keep_their_bits() -> None:
    back = values.decode(values.encode([-0.0, math.nan, math.inf], "state"))
    assert math.copysign(1, back[0]) == -1 and math.isnan(back[1]) and back[2] == math.inf
