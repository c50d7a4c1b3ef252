"""Live tensors and optimizers as a target of replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from everystep.core.census import Census
from everystep.core.events import GRADIENT, Call, Edit, Fingerprints, Rebase, Seal, SlotValues
from everystep.recover.pending import Pending
from everystep.recover.slots import SlotLoader
from everystep.replay.apply import apply_call, write_edit
from everystep.replay.engine import Sent
from everystep.replay.tensors import Payload


class LiveTensors:
    """`tensors` are live ones by their atom in the found census, `optimizers` by their place in it."""

    def __init__(
        self,
        census: Census,
        tensors: Mapping[int, torch.Tensor],
        optimizers: Mapping[int, torch.optim.Optimizer],
        slots: SlotLoader,
        pending: Pending,
    ) -> None:
        self._census, self._tensors, self._optimizers = census, tensors, optimizers
        self._slots, self._pending = slots, pending

    def write(self, edits: Iterable[tuple[Edit, Payload]]) -> None:
        for edit, payload in edits:
            waits = edit.slot == GRADIENT
            target = self._pending.of(edit.atom, edit.dtype) if waits else self._slots.target(edit)
            write_edit(target, edit, payload)

    def set_values(self, event: SlotValues) -> None:
        self._slots.values(event)

    def replay_calls(
        self, calls: Sequence[tuple[Call, Payload]], base: Any = None
    ) -> list[list[int]]:
        return [self._replay_call(call, payload) for call, payload in calls]

    def rebase(self, rebase: Rebase, sent: dict[int, Sent]) -> None:
        self._slots.keep_only(sent)

    def seal(self, seal: Seal, changed: set[int]) -> None:
        """What it holds for the session was read when the point was found."""

    def compare(self, prints: Fingerprints, payload: Payload) -> None:
        """The trainer and its shadow agreed on the record."""

    def _replay_call(self, call: Call, payload: Payload) -> list[int]:
        parameters = [self._tensors[atom] for atom in self._census.optimizers[call.optimizer].atoms]
        optimizer = self._optimizers[call.optimizer]
        return apply_call(optimizer, parameters, call, self._census, payload)
