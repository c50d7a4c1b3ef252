"""How fast training goes, and how much slower while something is written: seen from the times of its seals.

Slowdown = time that training lost / time spent writing. The loss is seen against the quiet steps around it.
As long as little was seen, a prior counts more: a writer takes one of the cores.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from everystep.shadow.spans import Spans

_QUIET_STEPS_MIN = 16
_STEPS_MAX, _STRETCHES_MAX = 4096, 64  # then what is old counts half
_STRETCH_STEPS_MAX = 512  # what was quiet before says nothing of now
_PAUSE = 20.0  # steps that took so many times as long are no steps: somebody evaluates, or saves
_PRIOR_STRETCHES = 2  # that would have scattered as widely as the prior
_SHARE_MAX = 2.0  # a writer, and those who copy and hash for it
_NEIGHBOURS = 8  # quiet steps on each side that the ones between are compared with


@dataclass
class _Pace:
    """Steps of one kind, and how long the writer was at work meanwhile."""

    steps: float = 0.0
    seconds: float = 0.0
    lost: float = 0.0  # seconds beyond the quiet pace of that moment; less than none is noise
    lost_squares: float = 0.0
    stretches: float = 0.0  # that `lost` is the sum of
    write_seconds: float = 0.0  # in those stretches
    unsettled_seconds: float = 0.0  # written in the stretch that is not over yet

    def settle(self, lost_seconds: float) -> None:
        if self.stretches >= _STRETCHES_MAX:
            self.stretches, self.write_seconds = self.stretches / 2, self.write_seconds / 2
            self.lost, self.lost_squares = self.lost / 2, self.lost_squares / 2
        self.stretches += 1
        self.lost += lost_seconds
        self.lost_squares += lost_seconds**2
        self.write_seconds += self.unsettled_seconds

    def age(self) -> None:
        self.steps, self.seconds = self.steps / 2, self.seconds / 2


@dataclass
class _Stretch:
    """Steps beside one write, and the quiet ones around them."""

    pace: _Pace
    before: list[float]
    seconds: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def settle(self) -> None:
        if quiet := self.before + self.after:
            self.pace.settle(sum(self.seconds) - len(self.seconds) * statistics.mean(quiet))
        self.pace.unsettled_seconds = 0.0


class SlowdownEstimator:
    """Owned by the main thread."""

    def __init__(self, cores: int) -> None:
        self._prior = 1 / max(1, cores)
        self._quiet, self._basing, self._logging = _Pace(), _Pace(), _Pace()
        self._sealed_ns = 0
        self._before: deque[float] = deque(maxlen=_NEIGHBOURS)  # the newest quiet steps
        self._stretch: _Stretch | None = None  # not all of its neighbours have come yet
        self._written = (0.0, 0.0)
        self._records, self._bytes = 0, 0

    def record(
        self,
        sealed_ns: int,
        size: int,
        *,
        base_spans: Spans,
        log_spans: Spans,
        base_seconds: float,
        log_seconds: float,
    ) -> None:
        """A step was sealed. Bases and writes of the log have taken so many seconds so far."""
        self._records, self._bytes = self._records + 1, self._bytes + size
        before, self._sealed_ns = self._sealed_ns, sealed_ns
        # the shadow may read this record late: what counts is what was written while the step was done
        basing = base_spans.meet(before, sealed_ns)
        pace = self._basing if basing else self._quiet
        if pace is self._quiet and log_spans.meet(before, sealed_ns):
            pace = self._logging
        self._basing.unsettled_seconds += base_seconds - self._written[0]
        if not basing:  # what is written beside a base is part of that
            self._logging.unsettled_seconds += log_seconds - self._written[1]
        self._written = base_seconds, log_seconds
        seconds = (sealed_ns - before) / 1e9
        if before and seconds >= 0 and not self._is_pause(pace, seconds):
            self._add(pace, seconds)
        if self._quiet.steps + self._logging.steps > _STEPS_MAX:
            for each in (self._quiet, self._basing, self._logging):
                each.age()

    def _add(self, pace: _Pace, seconds: float) -> None:
        pace.steps, pace.seconds = pace.steps + 1, pace.seconds + seconds
        stretch = self._stretch
        if pace is self._quiet:
            self._before.append(seconds)
            if stretch is not None:
                stretch.after.append(seconds)
            if stretch is None or len(stretch.after) < _NEIGHBOURS:
                return
        elif stretch is not None and stretch.pace is pace and not stretch.after:
            if len(stretch.seconds) < _STRETCH_STEPS_MAX:
                stretch.seconds.append(seconds)
                return
            self._before.clear()
        if stretch is not None:
            stretch.settle()
        busy = pace is not self._quiet
        self._stretch = _Stretch(pace, list(self._before), [seconds]) if busy else None

    def _is_pause(self, pace: _Pace, seconds: float) -> bool:
        usual = pace.seconds / pace.steps if pace.steps >= _QUIET_STEPS_MIN else 0.0
        return usual > 0 and seconds > _PAUSE * usual

    @property
    def record_bytes(self) -> float:
        return self._bytes / self._records if self._records else 0.0

    @property
    def iteration_seconds(self) -> float:
        """Of a step without anything being written, once there were enough of them."""
        pace = self._quiet
        if pace.steps < _QUIET_STEPS_MIN and self._logging.steps >= _QUIET_STEPS_MIN:
            pace = self._logging
        return pace.seconds / pace.steps if pace.steps >= _QUIET_STEPS_MIN else 0.0

    @property
    def base_slowdown(self) -> float:
        return self._share(self._basing)

    @property
    def log_slowdown(self) -> float:
        return self._share(self._logging)

    def _share(self, pace: _Pace) -> float:
        """What was seen and the prior, each counting the more the less it can be off."""
        if self._quiet.steps < _QUIET_STEPS_MIN or not pace.stretches or pace.write_seconds <= 0:
            return self._prior
        seen = min(max(pace.lost / pace.write_seconds, 0.0), _SHARE_MAX)
        variance = self._variance(pace)
        return seen + variance / (variance + self._prior**2) * (self._prior - seen)

    def _variance(self, pace: _Pace) -> float:
        """Of the share that was seen. Few stretches may be alike by chance, or all be off: it counts how they
        scatter around the prior too, and some are added that scatter as the prior does."""
        count, written = pace.stretches, pace.write_seconds / pace.stretches
        mean, assumed = pace.lost / count, self._prior * written
        scatter = max(pace.lost_squares - count * mean**2, 0.0)
        scatter += (mean - assumed) ** 2 + _PRIOR_STRETCHES * assumed**2
        return scatter / (count + _PRIOR_STRETCHES) / count / written**2
