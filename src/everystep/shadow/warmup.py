"""When a full ring begins to mean that the shadow lags. Owned by the main loop."""

from __future__ import annotations

import time

from everystep.lane.ring import RingReader

_CATCH_UP_SECONDS = 30.0


class Warmup:
    """Until what piled up at the start is taken in and the first base is copied, a full ring is no lag: the
    trainer waits for it and drops nothing."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._ready_since = 0.0
        self.done = False

    def look_after(self, *, has_base: bool) -> None:
        """To be called once records can be replayed. `has_base`: the first one is being copied, or was."""
        if self.done:
            return
        self._ready_since = self._ready_since or time.monotonic()
        patient = time.monotonic() - self._ready_since < _CATCH_UP_SECONDS
        caught_up = 2 * self._ring.waiting <= self._ring.geometry.slots and has_base
        if caught_up or not patient:
            self._ring.say_warm()
            self.done = True
