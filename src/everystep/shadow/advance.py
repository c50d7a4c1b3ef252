"""Moves the replica on, record by record, through torch. Owned by the shadow's main thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from everystep.core.census import Census
from everystep.core.events import Call
from everystep.format import values
from everystep.format.optimizer import decode_values
from everystep.replay import optimizers, slots, tensors
from everystep.replay.apply import apply_call
from everystep.shadow.replica import Replica

Calls = Sequence[tuple[Call, memoryview]]


class Advance:
    """Optimizers of mode REPLAY, rebuilt on parameters that lie in the replica's memory."""

    copies = False

    def __init__(self, census: Census, replica: Replica) -> None:
        self._census = census
        self._replica = replica
        self._parameters: dict[int, torch.nn.Parameter] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._bound: dict[tuple[int, str], torch.Tensor] = {}
        self._rebind: set[int] = set()

    def calls(self, calls: Calls, base: object = None) -> list[list[int]]:
        """Apply calls in their order; returns the atoms that each of them moved."""
        return [self._call(call, payload) for call, payload in calls]

    def _call(self, call: Call, payload: memoryview) -> list[int]:
        spec = self._census.optimizers[call.optimizer]
        optimizer = self._optimizer(call)
        for atom in self._rebind.intersection(spec.atoms):
            self._bind(call.optimizer, atom)
        parameters = [self._parameter(atom) for atom in spec.atoms]
        moved = apply_call(
            optimizer,
            parameters,
            call,
            self._census,
            payload,
            skip=lambda atom: not self._replica.based[atom],
            quickly=True,
        )
        self._adopt_slots(call.optimizer, optimizer, moved)
        return moved

    def slots_changed(self, atom: int) -> None:
        """The atom's slots were written or replaced from outside: look at them again."""
        self._rebind.add(atom)

    def _parameter(self, atom: int) -> torch.nn.Parameter:
        if atom not in self._parameters:
            spec = self._census.atoms[atom]
            value = tensors.view_tensor(self._replica.view((atom, "")), spec.dtype, spec.shape)
            self._parameters[atom] = torch.nn.Parameter(value, requires_grad=False)
        return self._parameters[atom]

    def _optimizer(self, call: Call) -> torch.optim.Optimizer:
        if call.optimizer not in self._optimizers:
            spec = self._census.optimizers[call.optimizer]
            groups = decode_values(call.groups, tensors.unpack).groups
            built = optimizers.rebuild(spec, groups, [self._parameter(a) for a in spec.atoms])
            self._optimizers[call.optimizer] = built
            self._rebind.update(spec.atoms)
        return self._optimizers[call.optimizer]

    def _bind(self, index: int, atom: int) -> None:
        """Let the optimizer's state of an atom be exactly what the replica holds."""
        prefix = self._census.optimizers[index].key + "/"
        state: dict[str, Any] = self._optimizers[index].state[self._parameter(atom)]
        state.clear()
        for slot, view, place in self._replica.slots_of(atom):
            if slot.startswith(prefix):
                tensor = tensors.view_tensor(view, place.dtype, place.shape)
                state[slot.removeprefix(prefix)] = self._bound[atom, slot] = tensor
        encoded = self._replica.values.get((atom, index))
        if encoded is not None:
            state.update(values.decode(encoded, tensors.unpack))
        elif not state:
            del self._optimizers[index].state[self._parameter(atom)]
        self._rebind.discard(atom)

    def _adopt_slots(self, index: int, optimizer: torch.optim.Optimizer, moved: list[int]) -> None:
        """Bring state tensors that the step made or replaced into the replica's memory."""
        prefix = self._census.optimizers[index].key + "/"
        fresh: list[tuple[int, str, torch.Tensor]] = []
        for atom in moved:
            state = optimizer.state.get(self._parameter(atom))
            others: dict[Any, Any] = {}
            for name, value in (state or {}).items():
                if not (isinstance(value, torch.Tensor) and slots.is_a_name(name)):
                    others[name] = value
                elif self._bound.get((atom, prefix + name)) is not value:
                    fresh.append((atom, prefix + name, value))
            if others or state == {}:
                encoded = values.encode(others, "slots", tensors.pack)
                self._replica.set_values(atom, index, encoded)
            else:
                self._replica.values.pop((atom, index), None)
        self._replica.reserve(
            (atom, slot, tensors.dtype_name(t, slot), tuple(t.shape)) for atom, slot, t in fresh
        )
        for atom, slot, tensor in fresh:
            place = self._replica.places[atom, slot]
            shared = tensors.view_tensor(self._replica.view((atom, slot)), place.dtype, place.shape)
            shared.copy_(tensor)
            optimizer.state[self._parameter(atom)][slot.removeprefix(prefix)] = shared
            self._bound[atom, slot] = shared
