"""How long something is waited for that takes as long as it takes: while it goes on, and no longer."""

from __future__ import annotations

from enum import StrEnum

TELL_SECONDS = 10.0
TELL_AGAIN_SECONDS = 30.0
STILL_SECONDS = 300.0


class Wait(StrEnum):
    ON = "on"
    TELL = "tell"  # go on, and say what is waited for
    OVER = "over"  # nothing has moved for too long


class Patience:
    """Looked at now and then. `sign` is anything that changes as long as the work goes on."""

    def __init__(self, now: float, still_seconds: float = STILL_SECONDS) -> None:
        self._still_seconds = still_seconds
        self._sign: object = None
        self._moved_at = now
        self._tell_at = now + TELL_SECONDS

    def look(self, sign: object, now: float) -> Wait:
        if sign is not None and sign != self._sign:
            self._sign, self._moved_at = sign, now
        if now - self._moved_at > self._still_seconds:
            return Wait.OVER
        if now < self._tell_at:
            return Wait.ON
        self._tell_at = now + TELL_AGAIN_SECONDS
        return Wait.TELL

    def still(self, now: float) -> float:
        """For how many seconds nothing has moved."""
        return now - self._moved_at
