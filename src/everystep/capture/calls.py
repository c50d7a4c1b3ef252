"""Logs optimizer calls: the gradients each consumed, and every scalar it used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch

from everystep.capture.census import LiveCensus, kind_of_gradient
from everystep.capture.copying.copier import Copier
from everystep.capture.copying.early import EarlyTap, Guard, hooked_members
from everystep.capture.copying.lifetime import GradientLifetime
from everystep.capture.outbox import Outbox, RingFull
from everystep.capture.states import StateSender
from everystep.capture.versions import Versions
from everystep.core.census import ALIGN_BYTES, Mode, gradient_layout
from everystep.core.events import AMP_BYTES, AmpName, Call, pack_presence
from everystep.core.pace import costs_too_much, early_pays
from everystep.replay.optimizers import rewrites_gradients

_EARLY_LOOK_EVERY = 16
_EARLY_SLACK_BYTES = 1 << 10  # param groups may say more at the step than they did at the last one
_grad = attrgetter("grad")


class _Presence(NamedTuple):
    """Which gradients are there, nearly always the same ones at every step."""

    present: list[bool]
    packed: bytes
    atoms: tuple[int, ...]
    kinds: list[Any]  # that they must have to be logged


class CallLog:
    """Owned by the training thread. `records`: whether a step is open for gradients; `rebase` has all state
    sent again, because what was logged cannot be trusted."""

    def __init__(
        self,
        live: LiveCensus,
        outbox: Outbox,
        copier: Copier,
        states: StateSender,
        versions: Versions,
        *,
        guard: Guard,
        records: Callable[[], bool],
        rebase: Callable[[None], None],
        budget_percent: float,
    ) -> None:
        self._live = live
        self._outbox = outbox
        self._copier = copier
        self._states = states
        self._versions = versions
        self._guard = guard
        self._records, self._rebase = records, rebase
        self._budget_percent = budget_percent
        self._layouts = [gradient_layout(live.census, i) for i in range(len(live.optimizers))]
        self._atoms = [spec.atoms for spec in live.census.optimizers]
        self._parameters = [[live.tensors[a] for a in atoms] for atoms in self._atoms]
        self._presences = [_Presence([], b"", (), [])] * len(live.optimizers)
        self._groups = live.group_values
        self.lifetime = GradientLifetime(copier)
        self._early: dict[int, EarlyTap] = {}
        self._early_room: dict[int, tuple[int | None, int, int]] = {}  # slot, place, document bytes
        self._stall_before, self._looked_at = 0.0, 0
        self._pending: tuple[Call, tuple[int, ...]] | None = None  # and atoms that have a gradient
        self.early_gradients = 0  # that left during backward

    @property
    def gradient_bytes(self) -> int:
        return max((layout.bytes for layout in self._layouts), default=0)

    @property
    def early_tap(self) -> list[str]:
        return [str(early.trust) for early in self._early.values()]

    # ------------------------------------------------------------------ a call

    def log(self, index: int) -> None:
        """Copy the gradients as the optimizer will see them. Counts only once the step is `done`."""
        atoms = self._atoms[index]
        self.discard()
        gradients = list(map(_grad, self._parameters[index]))
        presence = self._presence(index, list(map(is_not, gradients, repeat(None))))
        there = list(compress(gradients, presence.present))
        if not self.lifetime.look(index, there):
            self._rebase(None)  # the last record may hold what was written into them since
        if list(map(kind_of_gradient, there)) != presence.kinds:
            self._states.unlogged.update(atoms)
        gone = self._early[index].take(gradients) if index in self._early else set()
        self._states.changes(atoms, [index], stays=False)
        if not self._states.unlogged.isdisjoint(atoms):
            return  # their whole state goes with the seal
        groups, layout = self.groups(index), self._layouts[index]
        at = self._room_of_early(index, len(groups)) if gone else None
        if at is None:
            gone = set()
            at = self._outbox.room(
                layout.bytes + AMP_BYTES, len(groups) + len(presence.packed) + 64
            )
        self.early_gradients += len(gone)
        amp = self._send_amp(index, at + layout.bytes)
        self._copier.state.send()
        without = gone | self._places(atoms, self._states.bases.baseless)
        if without:
            gradients = [None if i in without else g for i, g in enumerate(gradients)]
        self._copier.gradients.send(self._outbox.address(at), index, layout, gradients)
        if rewrites_gradients(self._live.optimizers[index]):
            self._copier.in_flight.release()
        self._pending = (Call(index, groups, presence.packed, at, amp), presence.atoms)

    def done(self, index: int) -> None:
        """The optimizer has stepped: the call counts."""
        if self._pending is not None:
            (call, atoms), self._pending = self._pending, None
            self._outbox.add(call)
            self._versions.change(atoms, self._states.target)
        if index in self._early and not self._early[index].end_step():
            self._rebase(None)
        self.lifetime.after_step(index)

    def skip(self, index: int) -> None:
        """The optimizer has stepped and nobody records it: keep nothing of it alive."""
        self._copier.in_flight.release()
        if index in self._early:
            self._early[index].forget_step()

    def discard(self) -> None:
        """A call whose step raised, or whose closure ran again, never happened."""
        if self._pending is not None:
            self._outbox.give_back_room(self._pending[0].at)
            self._pending = None

    def turn(self, step: int) -> None:
        """At a seal."""
        self.lifetime.turn()
        self._copier.in_flight.grow_old()
        for early in self._early.values():
            early.forget_step()  # a backward without a step leads nowhere
        if (
            self._states.bases.atoms_left
        ):  # what a base makes training wait for says nothing of gradients
            self._stall_before, self._looked_at = self._copier.stall_seconds, step
        elif step - self._looked_at >= _EARLY_LOOK_EVERY and self._copier.sides:
            self._looked_at = step
            self._consider_early_tap()

    def rest(self) -> None:
        """Nothing is recorded from here on."""
        self.discard()
        for early in self._early.values():
            early.unhook()

    def go_on(self) -> None:
        """Recording begins again."""
        for early in self._early.values():
            early.hook()

    def groups(self, index: int) -> bytes:
        """Every value of the param groups, encoded."""
        return self._groups[index].encoded()

    def _presence(self, index: int, present: list[bool]) -> _Presence:
        if present != self._presences[index].present:
            atoms = tuple(compress(self._atoms[index], present))
            kinds = [(torch.strided, *self._live.kinds[atom]) for atom in atoms]
            self._presences[index] = _Presence(present, pack_presence(present), atoms, kinds)
        return self._presences[index]

    @staticmethod
    def _places(atoms: tuple[int, ...], wanted: set[int]) -> set[int]:
        return {i for i, atom in enumerate(atoms) if atom in wanted} if wanted else set()

    def _send_amp(self, index: int, at: int) -> dict[AmpName, int]:
        """What a GradScaler told the optimizer; it lies on the device, so it travels as bytes."""
        found: dict[AmpName, int] = {}
        names: tuple[AmpName, ...] = ("grad_scale", "found_inf")
        for name in names:
            tensor = getattr(self._live.optimizers[index], name, None)
            if tensor is not None:
                scalar = tensor.detach().to(torch.float32).view(-1)
                self._copier.state.piece(self._outbox.address(at), scalar, 0, 4, stays=False)
                found[name] = at
                at += ALIGN_BYTES
        return found

    # ------------------------------------------------------------------ gradients ahead of the call

    def _consider_early_tap(self) -> None:
        """Gradients should leave earlier if the compute stream keeps waiting for them."""
        stall = self._copier.stall_seconds - self._stall_before
        self._stall_before += stall
        too_much = costs_too_much(
            stall,
            steps=_EARLY_LOOK_EVERY,
            window_seconds=self._copier.window_seconds,
            budget_percent=self._budget_percent,
        )
        for index, spec in enumerate(self._live.census.optimizers) if too_much else ():
            if index in self._early or spec.mode is Mode.STATE:
                continue
            devices = {parameter.device for parameter in self._parameters[index]}
            eligible = len(devices) == 1 and devices <= self._copier.sides.keys()
            hooks = len(hooked_members(self._parameters[index]))
            if eligible and early_pays(stall, steps=_EARLY_LOOK_EVERY, hooks=hooks):
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
        if not self._records() or self._states.bases.baseless:
            return None
        document = len(self.groups(index)) + len(self._parameters[index]) + _EARLY_SLACK_BYTES
        try:
            at = self._outbox.room(self._layouts[index].bytes + AMP_BYTES, document)
        except RingFull:
            return None  # the step will find the same, and say so
        self._early_room[index] = (self._outbox.ticket, at, document)
        return self._outbox.address(at)

    def _room_of_early(self, index: int, groups_bytes: int) -> int | None:
        """The place that gradients went to ahead of the step, if it is still in the current slot."""
        ticket, at, document = self._early_room.pop(index, (None, 0, 0))
        fits = groups_bytes + len(self._parameters[index]) + 64 <= document
        return at if ticket is not None and ticket == self._outbox.ticket and fits else None
