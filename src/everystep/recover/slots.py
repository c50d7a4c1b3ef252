"""The slots of live optimizers while a found point is loaded and its log replayed. A slot may be of any type
at any step: what came last of an atom is what there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from everystep.core.census import Census
from everystep.core.events import Edit, Rebase, SlotValues
from everystep.errors import CorruptData
from everystep.format import values
from everystep.replay.slots import device_of, new_slot
from everystep.replay.tensors import unpack_on

Parameters = Callable[[int], torch.Tensor]  # the live tensor of an atom of the found census


class SlotLoader:
    """`optimizers` are live ones, by their place in the found census."""

    def __init__(
        self,
        census: Census,
        optimizers: Mapping[int, torch.optim.Optimizer],
        parameters: Parameters,
    ) -> None:
        self._census = census
        self._optimizers = optimizers
        self._parameters = parameters
        self._keys = {spec.key: i for i, spec in enumerate(census.optimizers)}
        self._groups = [
            {atom: number for number, group in enumerate(spec.groups) for atom in group}
            for spec in census.optimizers
        ]
        self._sent: dict[int, set[tuple[int, Any]]] = {}  # by atom: optimizer and name
        self._told: dict[int, set[int]] = {}  # by atom: optimizers whose other slots were sent

    def replace(self, atom: int, slot: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor for a slot, whatever it was before: an old one may share its memory with others."""
        index, name = self._find(slot)
        self._sent.setdefault(atom, set()).add((index, name))
        parameter, optimizer = self._parameters(atom), self._optimizers[index]
        group = optimizer.param_groups[self._groups[index][atom]]
        made = new_slot(dtype, shape, parameter, device_of(optimizer, group, name, parameter))
        self._state(index, atom)[name] = made
        return made

    def target(self, edit: Edit) -> torch.Tensor:
        """Where the bytes of an edit go. Its first piece begins a tensor; the others belong to that one."""
        if not edit.slot:
            if edit.start == 0:  # an atom's value comes before its slots: these follow now
                self._sent.pop(edit.atom, None)
                self._told.pop(edit.atom, None)
            return self._parameters(edit.atom)
        if edit.start == 0:
            return self.replace(edit.atom, edit.slot, edit.dtype, edit.shape)
        index, name = self._find(edit.slot)
        found = self._state(index, edit.atom).get(name)
        if not isinstance(found, torch.Tensor) or found.nbytes < edit.start + edit.nbytes:
            raise CorruptData(f"read log: a part of slot {edit.slot!r} that nothing has begun")
        return found

    def values(self, event: SlotValues) -> None:
        """Slots that are no plain tensors."""
        unpack = unpack_on(self._parameters(event.atom).device)
        found = values.decode(event.values, unpack)
        if not isinstance(found, dict):
            raise CorruptData(f"read log: slots of atom {event.atom} are a {type(found).__name__}")
        self._state(event.optimizer, event.atom).update(found)
        self._sent.setdefault(event.atom, set()).update((event.optimizer, name) for name in found)
        self._told.setdefault(event.atom, set()).add(event.optimizer)

    def rebase(self, rebase: Rebase) -> None:
        """What was sent is all there is of these atoms: other slots had been thrown away."""
        for index, optimizer in self._optimizers.items():
            for atom in set(rebase.atoms) & self._groups[index].keys():
                parameter, sent = self._parameters(atom), self._sent.get(atom, set())
                state = optimizer.state.get(parameter, {})
                for name in [name for name in state if (index, name) not in sent]:
                    del state[name]
                if not state and index not in self._told.get(atom, ()):
                    optimizer.state.pop(parameter, None)

    def _find(self, slot: str) -> tuple[int, str]:
        key, _, name = slot.rpartition("/")
        return self._keys[key], name

    def _state(self, index: int, atom: int) -> dict[Any, Any]:
        state: dict[Any, Any] = self._optimizers[index].state.setdefault(self._parameters(atom), {})
        return state


def in_order(optimizer: torch.optim.Optimizer) -> None:
    """States in the order of the parameters, as an optimizer's first step makes them: who walks over
    `optimizer.state` meets them as before. What lies under other keys stays behind them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ordered = [(p, optimizer.state[p]) for p in parameters if p in optimizer.state]
    others = [(k, v) for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)]
    optimizer.state.clear()
    optimizer.state.update([*ordered, *others])
