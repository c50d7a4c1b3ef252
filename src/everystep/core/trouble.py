"""What keeps failing: in words, how often, and when it is tried again."""

from __future__ import annotations

from typing import NamedTuple

from everystep.core.cadence import retry_seconds


class Trouble(NamedTuple):
    problem: str = ""  # empty while all is well
    last: str = ""  # the newest problem, also once it is over
    failures: int = 0  # since the last success
    failures_total: int = 0
    retry_at: float = 0.0  # by the monotonic clock
    fenced: bool = False  # others have gone on, and that is for good

    def after(self, problem: str, now: float, *, fenced: bool = False) -> Trouble:
        """Once more: soon at first, then once a minute."""
        failures = self.failures + 1
        return Trouble(
            problem,
            problem,
            failures,
            self.failures_total + 1,
            now + retry_seconds(failures),
            self.fenced or fenced,
        )

    def over(self) -> Trouble:
        """It succeeded."""
        return self._replace(problem="", failures=0)

    def retry_now(self) -> Trouble:
        """Something has changed: it may succeed now, but has not yet."""
        return self._replace(failures=0, retry_at=0.0)

    @property
    def pause_seconds(self) -> float:
        """Until it is tried again; 0: nothing has failed."""
        return retry_seconds(self.failures) if self.failures else 0.0
