"""When a writer was at work: its last few spans, by the clock that seals carry, which never jumps."""

from __future__ import annotations

import time
from collections import deque

_KEPT = 64
_TOLD = 8
_STILL = 1 << 63


class Spans:
    """Begun by the main thread, ended by the writer's."""

    def __init__(self) -> None:
        self._spans: deque[tuple[int, int]] = deque(maxlen=_KEPT)

    def begin(self) -> None:
        """From now on, unless it is at work already."""
        if not self._spans or self._spans[-1][1] != _STILL:
            self._spans.append((time.monotonic_ns(), _STILL))

    def end(self) -> None:
        if self._spans:
            self._spans[-1] = (self._spans[-1][0], time.monotonic_ns())

    @property
    def ended(self) -> list[tuple[float, float]]:
        """The newest few that are over, in seconds."""
        over = [span for span in list(self._spans) if span[1] != _STILL]
        return [(begin / 1e9, end / 1e9) for begin, end in over[-_TOLD:]]

    def meet(self, begin_ns: int, end_ns: int) -> bool:
        """Whether the writer was at work at any time between the two."""
        return any(begin < end_ns and end > begin_ns for begin, end in self._spans)
