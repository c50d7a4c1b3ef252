"""What fails in the shadow's own loop: it is told, tried again, and given up only where that helps."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

START_OVER_MAX = 5
_TELL_SECONDS = 60.0  # from one line of the log to the next that says the same


class Faults:
    """Owned by the main thread."""

    def __init__(self) -> None:
        self.problem = ""
        self.starts_over = 0
        self._failed_at = 0.0
        self._failing_since: float | None = None
        self._failed_now = False
        self._logged, self._log_at = "", 0.0

    def replica_in_doubt(self, error: Exception) -> None:
        """Half a record may have been replayed."""
        self.starts_over += 1
        self._tell(
            f"the shadow failed {self.starts_over} times and starts over from a new base "
            f"({type(error).__name__}: {error})",
            error,
        )

    def failed(self, error: Exception) -> None:
        """The replica is what it was."""
        self._tell(f"the shadow fails and tries again ({type(error).__name__}: {error})", error)

    def _tell(self, problem: str, error: Exception) -> None:
        self.problem, self._failed_at, self._failed_now = problem, time.monotonic(), True
        if problem != self._logged or self._failed_at > self._log_at:
            self._logged, self._log_at = problem, self._failed_at + _TELL_SECONDS
            log.error("shadow_failed times=%d", self.starts_over, exc_info=error)

    def end_of_turn(self, healed_seconds: float, *, whole: bool) -> None:
        """What has not failed for so long is well again."""
        now = time.monotonic()
        if whole and now - self._failed_at > healed_seconds:
            self.problem = ""
        self._failing_since = (self._failing_since or now) if self._failed_now else None
        self._failed_now = False

    def last(self, seconds: float) -> bool:
        """Whether every turn has failed for so long: another shadow may do better."""
        since = self._failing_since
        return since is not None and time.monotonic() - since > seconds
