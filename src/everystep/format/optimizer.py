"""What an optimizer's call uses beside gradients and slots: param groups, state under keys that are no
parameters, attributes. A list holds param groups alone: the older encoding."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from everystep.errors import CorruptData
from everystep.format import values


class OptimizerValues(NamedTuple):
    groups: list[dict[str, Any]]
    state: Sequence[tuple[int, Any, Any]] = ()  # place in optimizer.state, key, value
    attributes: dict[str, Any] | None = None  # None: nobody looked at them
    unrecorded: frozenset[str] = frozenset()  # names of attributes that hold no storable value


def encode_values(
    groups: list[Any], state: Sequence[Sequence[Any]], attributes: Sequence[Sequence[Any]] | None
) -> bytes:
    """Each part as plain values: `state` as [place, key, value], `attributes` as [name, value], or [name]
    where the value cannot be stored."""
    if not state and attributes is None:
        return values.encode_plain(groups)
    members: dict[str, Any] = {"groups": groups, "state": state}
    if attributes is not None:
        members["attributes"] = attributes
    return values.encode_dict(members)


def decode_values(
    encoded: bytes, unpack: values.Unpack, group_count: int | None = None
) -> OptimizerValues:
    """`group_count`: number of param groups of the optimizer, if known. The last groups may be newer than
    these values."""
    found = _decoded(encoded, unpack)
    if group_count is not None and len(found.groups) > group_count:
        raise CorruptData(
            f"values of {len(found.groups)} param groups for an optimizer of {group_count}"
        )
    return found


def _decoded(encoded: bytes, unpack: values.Unpack) -> OptimizerValues:
    found = values.decode(encoded, unpack)
    try:
        if isinstance(found, list):
            return OptimizerValues(_groups(found))
        told = found.get("attributes")
        attributes = None if told is None else dict(pair for pair in told if len(pair) == 2)
        unrecorded = frozenset(pair[0] for pair in told or () if len(pair) == 1)
        if not all(isinstance(name, str) for name in (*(attributes or ()), *unrecorded)):
            raise ValueError("an attribute whose name is no string")
        state = [(operator.index(place), key, value) for place, key, value in found["state"]]
        set(map(hash, (key for _, key, _ in state)))  # TypeError for what can be no key
        return OptimizerValues(_groups(found["groups"]), state, attributes, unrecorded)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptData(f"decode what an optimizer used: {error}") from error


def _groups(found: Any) -> list[dict[str, Any]]:
    """Values alone: parameters stand in the census."""
    for group in found:
        if not isinstance(group, dict) or "params" in group:
            raise ValueError("a param group that is no dict of values")
        if not all(isinstance(key, str) for key in group):
            raise ValueError("a param group with a key that is no string")
    return list(found)
