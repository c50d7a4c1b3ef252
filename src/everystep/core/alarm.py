"""When a trainer tells that recording is in trouble: at once, and every few minutes until it is over."""

from __future__ import annotations

AGAIN_SECONDS = 300.0
_APART_SECONDS = 10.0  # between two messages: a trouble that comes and goes is told once


class Alarm:
    """One run's trouble, in words; empty while all is well. Owned by the training thread."""

    def __init__(self) -> None:
        self._problem = ""
        self._since = 0.0
        self._told: tuple[str, float] | None = None  # what was said last, and when
        self._awaited = False  # its end is still to be told

    def look(self, problem: str, now: float) -> str:
        """What to say now; mostly nothing."""
        if not problem:
            return self._over(now)
        if not self._problem:
            self._since = now
        self._problem = problem
        text, at = self._told or ("", now - AGAIN_SECONDS)
        pause = AGAIN_SECONDS if text == problem else _APART_SECONDS
        if now - at < pause:
            return ""
        self._told, self._awaited = (problem, now), True
        lasted = now - self._since
        return f"{problem} (for {lasted:.0f} s now)" if lasted >= 1 else problem

    def _over(self, now: float) -> str:
        """Said once for each time that trouble was told."""
        self._problem = ""
        if not self._awaited:
            return ""
        self._awaited = False
        return f"all is well again after {now - self._since:.0f} s"
