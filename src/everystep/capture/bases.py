"""What of a base has still to be sent, and how much of it goes with the next record."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.copying.copier import Copier
from everystep.core.census import Mode
from everystep.core.pace import FIRST_SLICE_BYTES, next_slice_bytes, steps_left
from everystep.lane.ring import RingWriter

_SLOTS_FOR_BASES = 4


class BaseQueue:
    """Owned by the training thread."""

    def __init__(
        self, live: LiveCensus, ring: RingWriter, copier: Copier, budget_percent: float
    ) -> None:
        self._live = live
        self._ring = ring
        self._copier = copier
        self._budget_percent = budget_percent
        self._units: list[tuple[int, ...]] = []  # atoms that go together
        self.baseless: set[int] = set()  # the shadow has no base of these, nor use for gradients
        self._slice_bytes = FIRST_SLICE_BYTES
        self._stall_before = 0.0
        self._log_atoms = {a for s in live.census.optimizers if s.mode is Mode.LOG for a in s.atoms}

    def add(self, atoms: Iterable[int] | None = None, *, fresh: bool = False) -> None:
        """Send the whole state of these atoms (None: all), some at every seal. Atoms of mode LOG are sent
        together. `fresh`: the shadow holds none of them until they arrive."""
        wanted = set(range(len(self._live.tensors))) if atoms is None else set(atoms)
        queued = {a for unit in self._units for a in unit}
        if wanted & self._log_atoms:
            self._units = [u for u in self._units if not self._log_atoms & set(u)]
            self._units.insert(0, tuple(sorted(self._log_atoms)))
        self._units += [(a,) for a in sorted(wanted - self._log_atoms - queued)]
        if fresh:
            self.baseless.update(wanted)

    def take(self, atoms: set[int]) -> list[int]:
        """These now, and those that go together with them."""
        now = [unit for unit in self._units if atoms & set(unit)]
        self._units = [unit for unit in self._units if unit not in now]
        return [atom for unit in now for atom in unit]

    def send_slice(
        self, gradient_bytes: int, send: Callable[[int], None], sent_bytes: Callable[[], int]
    ) -> list[int]:
        """The next slice, as long as half the ring stays free for records; returns its atoms."""
        slice_bytes = self._next_slice(gradient_bytes) if self._units else 0
        sent: list[int] = []
        before = sent_bytes()
        while self._units and (not sent or self._ring_has_room):
            if sent and self._copier.sides and sent_bytes() - before >= slice_bytes:
                break
            for atom in self._units.pop(0):
                send(atom)
                sent.append(atom)
        return sent

    def clear(self) -> None:
        """Nothing of what was to be sent is wanted any more."""
        self._units.clear()
        self.baseless.clear()

    def _next_slice(self, gradient_bytes: int) -> int:
        stall = self._copier.stall_seconds
        self._slice_bytes = next_slice_bytes(
            self._slice_bytes,
            link_bytes_per_second=self._copier.link_bytes_per_second,
            window_seconds=self._copier.window_seconds,
            gradient_bytes=gradient_bytes,
            stall_seconds=stall - self._stall_before,
            budget_percent=self._budget_percent,
        )
        self._stall_before = stall
        return self._slice_bytes

    @property
    def _ring_has_room(self) -> bool:
        return 2 * self._ring.free >= self._ring.geometry.slots

    @property
    def needs_patience(self) -> bool:
        """A base and the calls of its steps do not fit into a short ring together: training waits for the
        shadow then, or there would never be a base."""
        return bool(self._units) and self._ring.geometry.slots < _SLOTS_FOR_BASES

    @property
    def atoms_left(self) -> int:
        """Atoms of a base that have still to be sent."""
        return sum(len(unit) for unit in self._units)

    @property
    def steps_left(self) -> int:
        """About how many steps the rest of a base is spread over."""
        atoms = [a for unit in self._units for a in unit]
        tensors = [self._live.tensors[a] for a in atoms]
        for index in range(len(self._live.optimizers)):
            slots = (v for a in atoms for v in self._live.state_of(index, a).values())
            tensors += [value for value in slots if isinstance(value, torch.Tensor)]
        slice_bytes = self._slice_bytes if self._copier.sides else self._ring.geometry.bytes // 2
        return steps_left(sum(t.nbytes for t in tensors), slice_bytes)
