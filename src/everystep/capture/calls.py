"""Logs optimizer calls: the gradients each consumed, and every scalar it used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.copier import Copier
from everystep.capture.early import EarlyTap, Guard
from everystep.capture.lifetime import GradientLifetime
from everystep.capture.outbox import LetGo, Outbox
from everystep.capture.states import StateSender
from everystep.core.census import ALIGN_BYTES, Mode, gradient_layout
from everystep.core.events import AMP_BYTES, Call, pack_presence, unpack_presence
from everystep.core.pace import costs_too_much
from everystep.format import values
from everystep.replay.optimizers import rewrites_gradients
from everystep.replay.tensors import pack

_EARLY_LOOK_EVERY = 16
_EARLY_SLACK_BYTES = 1 << 10  # param groups may say more at the step than they did at the last one


class CallLog:
    """Owned by the training thread. `may_go_early` says whether the record is open for gradients."""

    def __init__(
        self,
        live: LiveCensus,
        outbox: Outbox,
        copier: Copier,
        states: StateSender,
        versions: list[int],
        *,
        guard: Guard,
        may_go_early: Callable[[], bool],
        budget_percent: float,
    ) -> None:
        self._live = live
        self._outbox = outbox
        self._copier = copier
        self._states = states
        self._versions = versions
        self._guard = guard
        self._may_go_early = may_go_early
        self._budget_percent = budget_percent
        self._layouts = [gradient_layout(live.census, i) for i in range(len(live.optimizers))]
        self._parameters = [[live.tensors[a] for a in s.atoms] for s in live.census.optimizers]
        self._usual: list[Any] = [None] * len(live.optimizers)  # kinds of gradients seen last
        self.lifetime = GradientLifetime(copier)
        self._early: dict[int, EarlyTap] = {}
        self._early_room: dict[int, tuple[int | None, int, int]] = {}  # slot, place, document bytes
        self._stall_before = 0.0
        self._pending: tuple[Call, int] | None = None
        self.early_gradients = 0  # that left during backward
        self.rebases = 0  # because what was logged could not be trusted

    @property
    def gradient_bytes(self) -> int:
        return max((layout.bytes for layout in self._layouts), default=0)

    @property
    def early_tap(self) -> list[str]:
        return [str(early.trust) for early in self._early.values()]

    # ------------------------------------------------------------------ a call

    def log(self, index: int) -> None:
        """Copy the gradients as the optimizer will see them. Counts only once the step is `done`."""
        atoms = self._live.census.optimizers[index].atoms
        self.discard()
        gradients = [parameter.grad for parameter in self._parameters[index]]
        if not self.lifetime.look(index, gradients):
            self._base_everything()  # the last record may hold what was written into them since
        if not self._loggable(index, gradients):
            self._states.unlogged.update(atoms)
        gone = self._early[index].take(gradients) if index in self._early else set()
        self._states.changes(atoms, [index], stays=False)
        if not self._states.unlogged.isdisjoint(atoms):
            return  # their whole state goes with the seal
        groups, layout = self.groups(index), self._layouts[index]
        presence = pack_presence([g is not None for g in gradients])
        at = self._room_of_early(index, len(groups)) if gone else None
        if at is None:
            gone = set()
            at = self._outbox.room(layout.bytes + AMP_BYTES, len(groups) + len(presence) + 64)
        self.early_gradients += len(gone)
        amp = self._send_amp(index, at + layout.bytes)
        self._copier.state.send()
        without = gone | self._places(atoms, self._states.baseless)
        if without:
            gradients = [None if i in without else g for i, g in enumerate(gradients)]
        self._copier.gradients.send(self._outbox.address(at), index, layout, gradients)
        if rewrites_gradients(self._live.optimizers[index]):
            self._copier.holds.release()
        self._pending = (Call(index, groups, presence, at, amp), at)

    def done(self, index: int) -> None:
        """The optimizer has stepped: the call counts."""
        atoms = self._live.census.optimizers[index].atoms
        if self._pending is not None:
            call, self._pending = self._pending[0], None
            self._outbox.add(call)
            present = unpack_presence(call.presence, len(atoms))
            for atom, there in zip(atoms, present, strict=True):
                if there:
                    self._versions[atom] = self._states.target
        if index in self._early and not self._early[index].end_step():
            self._base_everything()
        self.lifetime.after_step(index)

    def skip(self, index: int) -> None:
        """The optimizer has stepped and nobody records it: keep nothing of it alive."""
        self._copier.holds.release()
        if index in self._early:
            self._early[index].forget_step()

    def discard(self) -> None:
        """A call whose step raised, or whose closure ran again, never happened."""
        if self._pending is not None:
            self._outbox.unroom(self._pending[1])
            self._pending = None

    def turn(self, step: int) -> None:
        """At a seal."""
        self.lifetime.turn()
        self._copier.holds.grow_old()
        for early in self._early.values():
            early.forget_step()  # a backward without a step leads nowhere
        if step % _EARLY_LOOK_EVERY == 0 and self._copier.sides and not self._states.atoms_left:
            self._consider_early_tap()

    def remove(self) -> None:
        for early in self._early.values():
            early.remove()

    def groups(self, index: int) -> bytes:
        """Every value of the param groups, encoded."""
        found = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self._live.optimizers[index].param_groups
        ]
        key = self._live.census.optimizers[index].key
        return values.encode(found, f"optimizer[{key!r}].param_groups", pack)

    def _loggable(self, index: int, gradients: list[torch.Tensor | None]) -> bool:
        """Whether every gradient that is there has the kind, type and shape of its parameter."""
        there = [(g.layout, g.dtype, g.shape) for g in gradients if g is not None]
        if there == self._usual[index]:
            return True
        self._usual[index] = [
            (torch.strided, p.dtype, p.shape)
            for g, p in zip(gradients, self._parameters[index], strict=True)
            if g is not None
        ]
        return bool(there == self._usual[index])

    @staticmethod
    def _places(atoms: tuple[int, ...], wanted: set[int]) -> set[int]:
        return {i for i, atom in enumerate(atoms) if atom in wanted} if wanted else set()

    def _send_amp(self, index: int, at: int) -> dict[str, int]:
        """What a GradScaler told the optimizer; it lies on the device, so it travels as bytes."""
        found: dict[str, int] = {}
        for name in ("grad_scale", "found_inf"):
            tensor = getattr(self._live.optimizers[index], name, None)
            if tensor is not None:
                scalar = tensor.detach().to(torch.float32).view(-1)
                self._copier.state.piece(self._outbox.address(at), scalar, 0, 4, stays=False)
                found[name] = at
                at += ALIGN_BYTES
        return found

    def _base_everything(self) -> None:
        self.rebases += 1
        self._states.queue_base(range(len(self._versions)))

    # ------------------------------------------------------------------ gradients ahead of the call

    def _consider_early_tap(self) -> None:
        """Gradients should leave earlier if the compute stream keeps waiting for them."""
        stall = self._copier.stall_seconds
        too_much = costs_too_much(
            stall - self._stall_before,
            steps=_EARLY_LOOK_EVERY,
            window_seconds=self._copier.window_seconds,
            budget_percent=self._budget_percent,
        )
        self._stall_before = stall
        for index, spec in enumerate(self._live.census.optimizers) if too_much else ():
            devices = {parameter.device for parameter in self._parameters[index]}
            eligible = len(devices) == 1 and devices <= self._copier.sides.keys()
            if eligible and index not in self._early and spec.mode is not Mode.STATE:
                self._early[index] = EarlyTap(
                    index,
                    self._parameters[index],
                    self._layouts[index],
                    self._copier,
                    partial(self._make_early_room, index),
                    self._guard,
                )

    def _make_early_room(self, index: int) -> int | None:
        """Where gradients may go that are final before the step; None: not now."""
        if not self._may_go_early() or self._states.baseless:
            return None
        document = len(self.groups(index)) + len(self._parameters[index]) + _EARLY_SLACK_BYTES
        try:
            at = self._outbox.room(self._layouts[index].bytes + AMP_BYTES, document)
        except LetGo:
            return None  # the step will find the same, and say so
        self._early_room[index] = (self._outbox.ticket, at, document)
        return self._outbox.address(at)

    def _room_of_early(self, index: int, groups_bytes: int) -> int | None:
        """The place that gradients went to ahead of the step, if it is still in the current slot."""
        ticket, at, document = self._early_room.pop(index, (None, 0, 0))
        fits = groups_bytes + len(self._parameters[index]) + 64 <= document
        return at if ticket is not None and ticket == self._outbox.ticket and fits else None
