"""The slots of live optimizers while a restore point is loaded and its log replayed. The type of
a slot may change at any step: the newest event of an atom says which slots it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everystep.core.census import Census
from everystep.core.events import Edit, SlotValues
from everystep.errors import CorruptData
from everystep.format import foreign, values
from everystep.replay.engine import Sent
from everystep.replay.slots import device_of, new_slot
from everystep.replay.tensors import unpack_on


class SlotLoader:
    """`optimizers` are live ones by their place in the found census, `parameters` by their atom in it."""

    def __init__(
        self,
        census: Census,
        optimizers: Mapping[int, torch.optim.Optimizer],
        parameters: Mapping[int, torch.Tensor],
    ) -> None:
        self._census = census
        self._optimizers = optimizers
        self._parameters = parameters
        self._keys = {spec.key: i for i, spec in enumerate(census.optimizers)}
        self._groups = [
            {atom: number for number, group in enumerate(spec.groups) for atom in group}
            for spec in census.optimizers
        ]

    def replace(self, atom: int, slot: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor for a slot, whatever it was before: an old one may share its memory with others."""
        index, name = self._find(slot)
        parameter, optimizer = self._parameters[atom], self._optimizers[index]
        group = optimizer.param_groups[self._groups[index][atom]]
        made = new_slot(dtype, shape, parameter, device_of(optimizer, group, name, parameter))
        self._state(index, atom)[name] = made
        return made

    def target(self, edit: Edit) -> torch.Tensor:
        """Where the bytes of an edit go. Its first piece begins a tensor; the others belong to that one."""
        if not edit.slot:
            return self._parameters[edit.atom]
        if edit.start == 0:
            return self.replace(edit.atom, edit.slot, edit.dtype, edit.shape)
        index, name = self._find(edit.slot)
        found = self._state(index, edit.atom).get(name)
        if not isinstance(found, torch.Tensor) or found.nbytes < edit.start + edit.nbytes:
            raise CorruptData(f"read log: a part of slot {edit.slot!r} that nothing has begun")
        return found

    def values(self, event: SlotValues) -> None:
        """Slots that are no plain tensors."""
        unpack = unpack_on(self._parameters[event.atom].device)
        found = values.decode(event.values, unpack)
        if not isinstance(found, dict):
            raise CorruptData(f"read log: slots of atom {event.atom} are a {type(found).__name__}")
        self._state(event.optimizer, event.atom).update(found)

    def keep_only(self, sent: Mapping[int, Sent]) -> None:
        """What was sent is all there is of these atoms: other slots had been thrown away."""
        for index, optimizer in self._optimizers.items():
            for atom in sent.keys() & self._groups[index].keys():
                parameter, names = self._parameters[atom], self._names(index, sent[atom])
                state = optimizer.state.get(parameter, {})
                for name in [name for name in state if name not in names]:
                    del state[name]
                if not state and index not in sent[atom].values:
                    optimizer.state.pop(parameter, None)

    def _names(self, index: int, sent: Sent) -> set[Any]:
        encoded = sent.values.get(index)
        others = values.decode_dict(encoded, foreign.checked_raw) if encoded else {}
        key = self._census.optimizers[index].key
        slots = (slot.rpartition("/") for slot in sent.slots)
        return {name for its, _, name in slots if its == key} | others.keys()

    def _find(self, slot: str) -> tuple[int, str]:
        key, _, name = slot.rpartition("/")
        return self._keys[key], name

    def _state(self, index: int, atom: int) -> dict[Any, Any]:
        state: dict[Any, Any] = self._optimizers[index].state.setdefault(self._parameters[atom], {})
        return state


def in_order(optimizer: torch.optim.Optimizer) -> None:
    """States in the order of the parameters, as an optimizer's first step makes them: who walks over
    `optimizer.state` meets them as before. What lies under other keys stays behind them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ordered = [(p, optimizer.state[p]) for p in parameters if p in optimizer.state]
    others = [(k, v) for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)]
    optimizer.state.clear()
    optimizer.state.update([*ordered, *others])
