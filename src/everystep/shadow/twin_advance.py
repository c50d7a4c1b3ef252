"""Moves the replica on through twins, several records in one pass, without torch. Main thread only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from everystep.core.census import Census, gradient_layout
from everystep.core.events import Call, unpack_presence
from everystep.format.optimizer import decode_values
from everystep.lane.memory import address_of, copy
from everystep.native import TARGET
from everystep.process.config import ShadowConfig
from everystep.replay.passes import Rows, Step, run_pass
from everystep.replay.rules.rule import Powers
from everystep.replay.twins import TWINS
from everystep.shadow.copies import BaseCopy
from everystep.shadow.replica import Replica


def twin_advance(config: ShadowConfig, replica: Replica, optimizer: int) -> TwinAdvance:
    powers = {beta: np.frombuffer(table, np.float32) for beta, table in config.powers.items()}
    return TwinAdvance(config.census, optimizer, replica, powers, config.replay_threads)


Calls = Sequence[tuple[Call, memoryview]]


class TwinAdvance:
    """One optimizer of mode REPLAY whose every dtype has a twin."""

    copies = True

    def __init__(
        self, census: Census, optimizer: int, replica: Replica, powers: Powers, threads: int
    ) -> None:
        spec = census.optimizers[optimizer]
        self._spec, self._census, self._replica = spec, census, replica
        self._powers, self._threads = powers, threads
        self._offsets = np.array(gradient_layout(census, optimizer).offsets, np.uint64)
        self._rule = TWINS[next(iter(spec.twins.values()))].rule
        atoms = list(spec.atoms)
        self._places = {
            dtype: np.array([i for i, a in enumerate(atoms) if census.atoms[a].dtype == dtype])
            for dtype in spec.twins
        }
        self._group_of = np.concatenate(
            [np.full(len(group), number) for number, group in enumerate(spec.groups)]
        )

    def calls(self, calls: Calls, base: BaseCopy | None = None) -> list[list[int]]:
        """Apply calls in their order; returns the atoms that each of them moved."""
        told = [self._step(call, payload) for call, payload in calls]
        if base is not None:
            self._keep_the_rest(base)
        steps = [
            step._replace(gradients=np.zeros_like(step.gradients)) if _skips(*call) else step
            for step, call in zip(told, calls, strict=True)
        ]
        # torch made them before its kernel skipped the step. Where a first gradient should have filled them,
        # they hold what the memory held: nobody could replay that, and fingerprints see to it
        self._make_slots(told if self._rule.begins_with_zeros else steps)
        for dtype, places in self._places.items():
            rows = self._rows(places, base)
            own = [step._replace(gradients=step.gradients[places]) for step in steps]
            run_pass(TWINS[self._spec.twins[dtype]], rows, own, self._powers, self._threads)
            self._keep_times(places, rows)
        if base is not None:
            base.filled = True
        atoms = np.array(self._spec.atoms)
        return [atoms[step.gradients != 0].tolist() for step in told]

    def slots_changed(self, atom: int) -> None:
        """Nothing is kept between two passes that could have changed."""

    def _step(self, call: Call, payload: memoryview) -> Step:
        present = np.array(unpack_presence(call.presence, len(self._spec.atoms)))
        present &= np.array([self._replica.based[atom] for atom in self._spec.atoms])
        scale = _scalar(call, payload, "grad_scale")
        start = np.uint64(address_of(payload) + call.at) if len(payload) else np.uint64(0)
        gradients = np.where(present, start + self._offsets, np.uint64(0))
        return Step(gradients, _groups(call.groups), scale)

    def _make_slots(self, steps: list[Step]) -> None:
        """Parameters that are moved for the first time get their slots, filled with zeros. Groups may change
        within a pass: what any of its steps needs must be there."""
        wanted: dict[tuple[int, str], tuple[str, tuple[int, ...]]] = {}
        for step in steps:
            names = [self._rule.slots_of(group) for group in step.groups]
            for place in np.flatnonzero(step.gradients):
                atom = self._spec.atoms[place]
                kind = self._census.atoms[atom]
                for name in names[self._group_of[place]]:
                    wanted[atom, self._slot(name)] = kind.dtype, kind.shape
                if (
                    self._rule.counts_steps
                    and (atom, self._slot("step")) not in self._replica.places
                ):
                    wanted[atom, self._slot("step")] = "float32", ()
        self._fresh = {
            atom
            for atom, slot in wanted
            if not self._rule.begins_with_zeros and (atom, slot) not in self._replica.places
        }
        self._replica.reserve((*key, *kind) for key, kind in wanted.items())

    def _keep_the_rest(self, base: BaseCopy) -> None:
        """Copy what the pass will not come by: buffers, frozen parameters, step counters."""
        own = {(a, self._slot(name)) for a in self._spec.atoms for name in self._rule.slots}
        own |= {(a, "") for a in self._spec.atoms}
        rest = [key for key in base.targets if key not in own]
        copy([base.targets[key] for key in rest], [base.sources[key] for key in rest])

    def _rows(self, places: np.ndarray, base: BaseCopy | None) -> Rows:
        targets = np.zeros(len(places), TARGET)
        times = np.zeros(len(places), np.int64)
        for row, place in enumerate(places):
            atom = self._spec.atoms[place]
            value = self._replica.view((atom, ""))
            target = targets[row]
            target["value"] = address_of(value) if len(value) else 0
            target["count"] = len(value) // (
                4 if self._census.atoms[atom].dtype == "float32" else 2
            )
            slots = [self._slot(name) for name in self._rule.slots]
            for number, slot in enumerate(slots):
                if (atom, slot) in self._replica.places and len(value):
                    target["slots"][number] = address_of(self._replica.view((atom, slot)))
            for number, slot in enumerate(["", *slots]):
                if base is not None and len(base.targets.get((atom, slot), b"")):
                    target["copies"][number] = address_of(base.targets[atom, slot])
            times[row] = self._time(atom)
        fresh = np.array([self._spec.atoms[p] in self._fresh for p in places], bool)
        return Rows(targets, self._group_of[places], times, fresh)

    def _slot(self, name: str) -> str:
        return f"{self._spec.key}/{name}"

    def _clock(self, atom: int) -> np.ndarray | None:
        place = self._replica.places.get((atom, self._slot("step")))
        if place is None:
            return None
        return np.frombuffer(self._replica.view((atom, self._slot("step"))), place.dtype)

    def _time(self, atom: int) -> int:
        clock = self._clock(atom)
        return 0 if clock is None else int(clock[0])

    def _keep_times(self, places: np.ndarray, rows: Rows) -> None:
        for place, time in zip(places, rows.times, strict=True):
            clock = self._clock(self._spec.atoms[place])
            if clock is not None:
                clock[0] = time


def _scalar(call: Call, payload: memoryview, name: str) -> float | None:
    """What a GradScaler told the optimizer."""
    return float(np.frombuffer(payload, "f4", 1, call.amp[name])[0]) if name in call.amp else None


def _skips(call: Call, payload: memoryview) -> bool:
    return bool(_scalar(call, payload, "found_inf"))


@lru_cache(maxsize=16)
def _groups(encoded: bytes) -> list[dict[str, Any]]:
    return decode_values(encoded, _number).groups


def _number(tag: str, payload: Any) -> Any:
    """A learning rate may be a tensor of one element: its value counts here, and its type."""
    if tag != "tensor":
        return payload
    name, shape, data, _ = payload
    known = name in ("float32", "float64") and math.prod(shape) == 1
    return np.frombuffer(data, name)[0] if known else None
