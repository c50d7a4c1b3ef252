"""How much recording slows training down, and when its user must hear of it."""

from __future__ import annotations

from collections import deque

_WINDOW_STEPS = 32
_WINDOWS = 3  # in a row, before anything is said: one slow moment is no slowdown


class Slowdown:
    """Seconds lost to recording over seconds of training, in windows. Owned by the training thread."""

    def __init__(self, budget_percent: float) -> None:
        self._budget = budget_percent
        self._began: tuple[float, float] | None = None  # time and seconds lost so far
        self._steps = 0
        self._windows: deque[tuple[float, float]] = deque(maxlen=_WINDOWS)  # seconds, lost
        self._told = False

    def sealed(self, now: float, lost_seconds: float) -> None:
        """A step was recorded; `lost_seconds` is the sum since attach."""
        if self._began is None:
            self._began, self._steps = (now, lost_seconds), 0
            return
        self._steps += 1
        if self._steps >= _WINDOW_STEPS:
            self._windows.append((now - self._began[0], lost_seconds - self._began[1]))
            self._began, self._steps = (now, lost_seconds), 0

    def skip(self) -> None:
        """What happens now says nothing of an ordinary step: a base is sent, or nothing is recorded."""
        self._began = None

    @property
    def percent(self) -> float | None:
        """Of the time that training takes by itself; None until there were enough steps."""
        if len(self._windows) < _WINDOWS:
            return None
        seconds = sum(seconds for seconds, _ in self._windows)
        lost = sum(lost for _, lost in self._windows)
        return 100.0 * lost / max(seconds - lost, 1e-9)

    def warning(self) -> str:
        """In words and once, if all of the newest windows were above the budget."""
        percent = self.percent
        if self._told or percent is None:
            return ""
        if any(100.0 * lost <= self._budget * (s - lost) for s, lost in self._windows):
            return ""
        self._told = True
        return f"recording slows training by {percent:.1f} %, above overhead_budget_percent={self._budget:g}"
