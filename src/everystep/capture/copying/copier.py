"""The way of bytes into the ring: at once from the CPU, through side streams from GPUs.

A slot is committed when its payload is there. On a GPU the last operation of the side stream says so; a
slot with state in flight is committed only when it is known that nobody changed it meanwhile (`settle`).
"""

from __future__ import annotations

import torch

from everystep.capture.copying.gradient_copies import GradientCopies
from everystep.capture.copying.in_flight import InFlightBuffers
from everystep.capture.copying.state_copies import StateCopies
from everystep.device.copy_stream import close_sides, open_sides
from everystep.format.slot import SLOT_DEVICE_WORD_AT, commit_word
from everystep.lane.ring import RingWriter


class Copier:
    """Owned by the training thread."""

    def __init__(self, ring: RingWriter, devices: set[torch.device]) -> None:
        self._ring = ring
        self._bytes = torch.frombuffer(ring.memory.map, dtype=torch.uint8)
        self.sides = open_sides(self._bytes, devices)
        self.in_flight = InFlightBuffers()
        self.gradients = GradientCopies(self._bytes, self.sides, self.in_flight)
        self.state = StateCopies(self._bytes, self.sides, self.in_flight)
        self._uncommitted: list[int] = []
        self._words: dict[int, torch.Tensor] = {}  # of every slot, as the device writes it

    def commit(self, ticket: int) -> None:
        """Say that a slot's payload is there; while state is in flight `settle` says it later."""
        self.state.send()
        if self.state.in_flight:
            self._uncommitted.append(ticket)
        else:
            self._write_word(ticket)

    def settle(self, *, intact: bool) -> bool:
        """The state in flight did not change until it was copied (`intact`), or it did: commit its
        slots, as they are or as a gap. True if a gap was made."""
        tickets, self._uncommitted = self._uncommitted, []
        self.state.clear()
        if not intact and tickets:
            self._ring.void(tickets)
        for ticket in tickets:
            self._write_word(ticket)
        return not intact and bool(tickets)

    def _write_word(self, ticket: int) -> None:
        if not self.sides:
            self._ring.commit_device(ticket)
            return
        first, *others = self.sides.values()
        for other in others:
            first.wait_for(other.mark())  # the word comes behind everybody's copies
        at = self._ring.slot_at(ticket) + SLOT_DEVICE_WORD_AT
        if at not in self._words:
            self._words[at] = self._bytes[at : at + 8]
        first.write_word(self._words[at], commit_word(self._ring.nonce, ticket))

    @property
    def device_is_idle(self) -> bool:
        """Whether everything that was queued is done: the device waits for the host. So it is without one."""
        return all(side.is_idle for side in self.sides.values())

    @property
    def stall_seconds(self) -> float:
        return sum(side.stall_seconds for side in self.sides.values())

    def open_window(self) -> None:
        """From here on, until the next step, state does not change."""
        for side in self.sides.values():
            side.open_window()

    def close_window(self) -> None:
        for side in self.sides.values():
            side.close_window()

    @property
    def window_seconds(self) -> float:
        return min((s.window_seconds for s in self.sides.values()), default=0.0)

    @property
    def link_bytes_per_second(self) -> float:
        return min((s.link_bytes_per_second for s in self.sides.values()), default=0.0)

    @property
    def allocated_bytes(self) -> int:
        return sum(side.allocated_bytes for side in self.sides.values())

    @property
    def peak_bytes(self) -> int:
        return sum(side.peak_bytes for side in self.sides.values())

    def close(self) -> None:
        close_sides(self._bytes, self.sides)
        self.in_flight.clear()
