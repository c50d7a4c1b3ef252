"""Limits on what a run writes: how large it may become, how fast it may grow, how much it writes in a day."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from everystep.option_values import size_bytes
from everystep.options import Options

DAY_SECONDS = 86400.0
_SLICE_SECONDS = 900.0  # of the day that is looked back on
Clock = Callable[[], float]


class Limits(msgspec.Struct, frozen=True):
    """As they travel to the shadow; 0: none."""

    store_quota: int = 0
    disk_bytes_per_second: int = 0
    disk_bytes_per_day: int = 0


def limits_of(options: Options) -> Limits:
    return Limits(
        *(size_bytes(f"tuning.{n}", getattr(options.tuning, n)) for n in Limits.__struct_fields__)
    )


class Rate:
    """Says how long to wait before so many bytes may go; a rate of 0 is none. A pause is not saved up for a
    burst."""

    def __init__(self, bytes_per_second: float, clock: Clock = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_second, clock
        self._free_at = 0.0

    def take(self, size: int) -> float:
        """Seconds from now until they have had their time, behind all that were taken before."""
        if not self._rate:
            return 0.0
        now = self._clock()
        self._free_at = max(self._free_at, now) + size / self._rate
        return self._free_at - now


class Day:
    """How many bytes were written in the last 24 hours, or a little longer: they are counted by slices."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[tuple[int, int]] = deque()  # number and bytes, oldest first
        self._total = 0

    def add(self, size: int) -> None:
        number = int(self._clock() // _SLICE_SECONDS)
        last = self._slices.pop() if self._slices and self._slices[-1][0] == number else (number, 0)
        self._slices.append((number, last[1] + size))
        self._total += size

    @property
    def written(self) -> int:
        oldest = int((self._clock() - DAY_SECONDS) // _SLICE_SECONDS)
        while self._slices and self._slices[0][0] < oldest:
            self._total -= self._slices.popleft()[1]
        return self._total

    def seconds_until(self, limit: int, size: int) -> float | None:
        """Until so many bytes more stay below the limit; None: they never do."""
        left = self.written + size - limit
        if size > limit:
            return None
        for number, count in self._slices if left > 0 else ():
            left -= count
            if left <= 0:
                return (number + 1) * _SLICE_SECONDS + DAY_SECONDS - self._clock()
        return 0.0


class Written(NamedTuple):
    """What one writer wrote in its life."""

    ended_ago: float | None  # seconds; None: nobody knows, the clock was set
    lived: float
    bytes: int


def written_last_day(writers: Iterable[Written]) -> int:
    """What they wrote within the last day, as if each had written evenly."""
    total = 0.0
    for ended_ago, lived, count in writers:
        if ended_ago is not None and ended_ago < DAY_SECONDS:
            total += count * min(1.0, (DAY_SECONDS - ended_ago) / max(lived, 1.0))
    return int(total)


def log_has_room(quota: int, *, used: int, size: int, next_base: int, may_go: int) -> bool:
    """Whether so many bytes of log fit below a quota, and the next base still fits behind them, at the latest
    once older bases have gone."""
    return not quota or (used + size <= quota and used + size + next_base <= quota + may_go)


def log_leaves_room(free: int, *, size: int, next_base: int) -> bool:
    """Whether a disk that takes so many bytes of log still takes the next base: behind that one the log
    before it goes. A disk that the log has filled would take none, for ever."""
    return free - size >= next_base
