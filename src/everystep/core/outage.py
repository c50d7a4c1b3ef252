"""Why a run is not recorded at the moment, and when to try again."""

from __future__ import annotations

import math

from everystep.core.cadence import retry_seconds


class Outage:
    """Owned by the training thread. `now` is monotonic."""

    def __init__(self) -> None:
        self.problem = ""  # in words; empty: there is none
        self._failures = 0
        self._retry_at = 0.0

    def begin(self, problem: str, now: float, *, at_once: bool = False) -> None:
        """Recording has failed. `at_once`: nothing speaks against trying again."""
        self.problem = problem
        self._failures += 1
        self._retry_at = 0.0 if at_once else now + retry_seconds(self._failures - 1)

    def end(self) -> None:
        self.problem, self._failures = "", 0

    def last(self, problem: str) -> None:
        """For good."""
        self.problem, self._retry_at = problem, math.inf

    @property
    def is_final(self) -> bool:
        return self._retry_at == math.inf

    def may_retry(self, now: float) -> bool:
        return now >= self._retry_at
