"""Every few steps some atoms and their slots are digested where they lie, and the digests travel with the
record: what the shadow has replayed must have the same. After a while it was every atom's turn."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.copying.copier import Copier
from everystep.capture.outbox import Outbox
from everystep.core.census import Mode, OptimizerSpec
from everystep.core.events import Fingerprints
from everystep.core.pace import (
    FINGERPRINT_SHARES_MAX,
    fingerprint_every,
    fingerprint_shares,
    smoothed,
)
from everystep.replay.fingerprints import digest_tensors, load_kernels

_NAME_BYTES = 16  # of a tensor's place in the document, without the name of its slot


def by_device(
    live: LiveCensus, atoms: Sequence[int], optimizers: Iterable[int]
) -> dict[torch.device, dict[tuple[int, str], torch.Tensor]]:
    """Values of these atoms, and the tensor slots that these optimizers have of them, as (atom, slot)."""
    found: dict[torch.device, dict[tuple[int, str], torch.Tensor]] = {}
    wanted = set(atoms)
    for atom in atoms:
        found.setdefault(live.tensors[atom].device, {})[atom, ""] = live.tensors[atom]
    for index in optimizers:
        spec = live.census.optimizers[index]
        for atom in (a for a in spec.atoms if a in wanted):
            for name, slot in live.slots_of(index, atom).tensors.items():
                found.setdefault(slot.device, {})[atom, f"{spec.key}/{name}"] = slot
    return found


class FingerprintSender:
    """Owned by the training thread. `every`: 0 lets the time decide that digests may take."""

    def __init__(self, live: LiveCensus, outbox: Outbox, copier: Copier, every: int) -> None:
        self._live, self._outbox, self._copier = live, outbox, copier
        self._every = every
        specs = live.census.optimizers
        # what is sent as state at every step, or only logged, is nothing that a shadow computes; and where
        # no twin gives a device's bits, that they differ is known
        self._optimizers = [i for i, spec in enumerate(specs) if self._is_replayed_exactly(spec)]
        replayed = {a for i in self._optimizers for a in specs[i].atoms}
        moved = {a for spec in specs for a in spec.atoms}
        self._atoms = [a for a in range(len(live.tensors)) if a in replayed or a not in moved]
        self._bytes = [live.census.atoms[a].bytes for a in self._atoms]
        self._next = 0  # the atom that the next part begins with
        self._sent_at: int | None = None
        self._share = 1.0  # of the whole, that the part sent last was
        self._step_seconds = self._host_seconds = 0.0
        self._sealed = time.perf_counter()
        for device in copier.sides:
            load_kernels(device)

    def _is_replayed_exactly(self, spec: OptimizerSpec) -> bool:
        devices = {self._live.tensors[atom].device.type for atom in spec.atoms}
        return spec.mode is Mode.REPLAY and (bool(spec.twins) or devices == {"cpu"})

    @property
    def every(self) -> int:
        """Steps in which the whole state is digested once."""
        if self._every:
            return self._every
        sides = self._copier.sides.values()
        device = max((side.digest_seconds for side in sides), default=0.0)
        return fingerprint_every((self._host_seconds + device) / self._share, self._step_seconds)

    def turn(self) -> None:
        """A step is over: how long steps take decides how often there is time for digests."""
        now = time.perf_counter()
        seconds, self._sealed = now - self._sealed, now
        self._step_seconds = smoothed(self._step_seconds, seconds)

    def is_due(self, step: int) -> bool:
        every = self.every
        apart = every // fingerprint_shares(every)
        return bool(self._atoms) and (self._sent_at is None or step - self._sent_at >= apart)

    def send(self, step: int) -> None:
        """Digest the next part: a small one as long as nobody knows what it takes."""
        known = self._every or self._sent_at is not None
        shares = fingerprint_shares(self.every) if known else FINGERPRINT_SHARES_MAX
        atoms = self._next_part(shares)
        began = time.perf_counter()
        for device, found in by_device(self._live, atoms, self._optimizers).items():
            side = self._copier.sides.get(device)
            self._send(found) if side is None else side.digest(partial(self._send, found))
        self._host_seconds = time.perf_counter() - began
        self._sent_at = step

    def _next_part(self, shares: int) -> list[int]:
        wanted = sum(self._bytes) / shares
        part: list[int] = []
        taken = 0
        while len(part) < len(self._atoms) and (not part or taken < wanted):
            part.append(self._atoms[self._next])
            taken += self._bytes[self._next]
            self._next = (self._next + 1) % len(self._atoms)
        self._share = max(taken, 1) / max(sum(self._bytes), 1)
        return part

    def _send(self, found: dict[tuple[int, str], torch.Tensor]) -> None:
        numbers = digest_tensors(list(found.values()))
        names = sum(len(slot) + _NAME_BYTES for _, slot in found)
        at = self._outbox.room(numbers.nbytes, names)
        address = self._outbox.address(at)
        self._copier.state.piece(address, numbers, 0, numbers.nbytes, stays=False)
        self._outbox.add(Fingerprints(tuple(found), at))
