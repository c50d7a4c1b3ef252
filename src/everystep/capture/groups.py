"""What an optimizer call uses beside gradients and slots, encoded: every value of the param groups, state
under keys that are no parameters, and the attributes of an optimizer that is not torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch

from everystep.capture.watching.state_stamp import has_other_keys
from everystep.errors import UnsupportedState
from everystep.format import values
from everystep.format.optimizer import encode_values
from everystep.format.unstorable import Unstorable
from everystep.replay.optimizers import attributes_of, is_torchs, why_no_state
from everystep.replay.tensors import pack, why_not_stored
from everystep.text import is_text

_FIXED = (type(None), bool, int, float, str, bytes)  # the same object has the same value for ever
Entry = tuple[int, Any, Any]  # place in optimizer.state, key, value


class GroupValues:
    """Of one optimizer. Encoded again only where a value was replaced, or may change in its place."""

    def __init__(self, optimizer: torch.optim.Optimizer, key: str) -> None:
        self._optimizer = optimizer
        self._where = f"optimizer[{key!r}]"
        self._has_attributes = not is_torchs(optimizer)
        self._device_tensors = _DeviceTensors()
        self._names: list[Any] = []
        self._values: list[Any] = []
        self._fixed = False
        self._encoded = b""

    def encoded(self) -> bytes:
        groups = self._optimizer.param_groups
        state = list(_other_state(self._optimizer))
        attributes = attributes_of(self._optimizer) if self._has_attributes else {}
        names = [*chain.from_iterable(groups), *(e[:2] for e in state), *attributes]
        found = list(chain.from_iterable(map(dict.values, groups)))
        found += [*(value for *_, value in state), *attributes.values()]
        if self._fixed and names == self._names and all(map(is_, found, self._values)):
            return self._encoded
        self._names, self._values = names, found
        self._encode(groups, state, attributes)
        return self._encoded

    def _encode(
        self, groups: list[dict[str, Any]], state: list[Entry], attributes: dict[str, Any]
    ) -> None:
        told = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        for number, key in ((n, k) for n, group in enumerate(told) for k in group):
            if not isinstance(key, str) or not is_text(key):
                raise UnsupportedState(
                    f"{self._where}.param_groups[{number}]: the key {values.shown(key)}, expected a string",
                    hint="give it a name",
                )
        plain = values.to_plain(told, f"{self._where}.param_groups", pack)
        with self._device_tensors as packed:
            others = [self._plain_entry(entry, packed.pack) for entry in state]
            own = self._plain_attributes(attributes, packed.pack) if self._has_attributes else None
        recorded = [attributes[pair[0]] for pair in own or () if len(pair) == 2]
        known = [*(v for group in told for v in group.values()), *(e[2] for e in state), *recorded]
        self._fixed = all(map(_is_fixed, known))
        self._encoded = encode_values(plain, others, own)

    def _plain_entry(self, entry: Entry, pack: values.Pack) -> list[Any]:
        place, key, value = entry
        where = f"{self._where}.state[{values.shown(key)}]"
        return [place, values.to_plain(key, where), values.to_plain(value, where, pack)]

    def _plain_attributes(self, found: dict[str, Any], pack: values.Pack) -> list[list[Any]]:
        """What cannot be stored is code, not state; so is a reference to what is recorded elsewhere."""
        pack_own = _NotElsewhere(self._optimizer, pack)
        plain: list[list[Any]] = []
        for name, value in found.items():
            reason = why_no_state(self._optimizer, name)
            try:
                told = values.to_plain(value, str(name), pack_own)
            except UnsupportedState:
                if isinstance(name, str) and is_text(name):
                    plain.append([name])
                continue
            if reason is not None:
                raise UnsupportedState(
                    f"{self._where}: its attribute {values.shown(name)} cannot be recorded: {reason}",
                    hint="rename it",
                )
            plain.append([name, told])
        return plain


def _other_state(optimizer: torch.optim.Optimizer) -> Iterator[Entry]:
    if has_other_keys(optimizer):
        entries: list[tuple[Any, Any]] = list(optimizer.state.items())
        for place, (key, value) in enumerate(entries):
            if not isinstance(key, torch.Tensor):
                yield place, key, value


def encode_groups(optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[bytes, ...]:
    """Of each optimizer, as they are now."""
    return tuple(GroupValues(optimizer, key).encoded() for key, optimizer in optimizers.items())


def _is_fixed(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) in _FIXED


class _NotElsewhere:
    """Packs the tensors of attributes, but none that is a parameter or slot, or lies in the memory of one."""

    def __init__(self, optimizer: torch.optim.Optimizer, pack: values.Pack) -> None:
        self._optimizer = optimizer
        self._pack = pack
        self._addresses: set[int] | None = None

    def __call__(self, value: Any) -> tuple[str, Any] | None:
        plain = isinstance(value, torch.Tensor) and why_not_stored(value) is None
        if plain and _address(value) in self._known():
            raise Unstorable("it is recorded elsewhere", "")
        return self._pack(value)

    def _known(self) -> set[int]:
        if self._addresses is None:
            groups = (group["params"] for group in self._optimizer.param_groups)
            slots = (s.values() for s in self._optimizer.state.values() if isinstance(s, dict))
            tensors = [t for t in chain(*groups, *slots) if isinstance(t, torch.Tensor)]
            plain = [t for t in tensors if why_not_stored(t) is None]
            self._addresses = set(map(_address, plain)) - {0}
        return self._addresses


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _DeviceTensors:
    """Reading a tensor back from a device makes training wait: it is done when version or address tell that
    it was written, and not at every step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, tuple[int, int], tuple[str, Any] | None]] = {}
        self._seen: set[int] = set()

    def pack(self, value: Any) -> tuple[str, Any] | None:
        if not isinstance(value, torch.Tensor) or value.device.type in ("cpu", "meta"):
            return pack(value)
        self._seen.add(id(value))
        hints = (value.data_ptr(), value._version)
        known = self._known.get(id(value))
        if known is None or known[1] != hints:
            known = self._known[id(value)] = (value, hints, pack(value))
        return known[2]

    def __enter__(self) -> _DeviceTensors:
        self._seen.clear()
        return self

    def __exit__(self, *_: object) -> None:
        """Keep nothing alive that the optimizer has dropped."""
        self._known = {i: known for i, known in self._known.items() if i in self._seen}
