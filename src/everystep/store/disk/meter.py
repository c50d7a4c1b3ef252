"""Everything that is written to a run passes here: it waits for its turn and is counted."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from everystep.core.limits import Clock, Day, Limits, Rate, log_has_room, log_leaves_room
from everystep.core.sizes import size as words
from everystep.errors import NotEnoughDisk

_NO_LIMITS = Limits()


class Throttle:
    """Keeps what is sent below a rate, by all threads together; a rate of 0 is none."""

    def __init__(
        self,
        bytes_per_second: int,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = Rate(bytes_per_second, clock)
        self._sleep = sleep
        self._lock = threading.Lock()
        self.total = 0
        self.waited_seconds = 0.0

    def __call__(self, size: int) -> None:
        """Returns when so many bytes may go."""
        with self._lock:
            pause = self._rate.take(size)
            self.total += size
            self.waited_seconds += pause
        if pause:
            self._sleep(pause)


class Meter:
    """Shared by the threads that write bases and the log of one shadow."""

    def __init__(
        self,
        limits: Limits = _NO_LIMITS,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self._throttle = Throttle(limits.disk_bytes_per_second, clock, sleep)
        self._day = Day(clock)
        self._used = 0  # by the run's directory, as far as that was measured
        self._next_base, self._expected_base, self._may_go = 0, 0, 0
        self._lock = threading.Lock()
        self.total = 0
        self.operations = (
            0  # chunks written or read back, files removed: it goes on as long as work does
        )
        self.hurry = False  # the host goes down: last words wait for nothing

    def __call__(self, size: int) -> None:
        """Returns when so many bytes may be written; they are counted as written."""
        with self._lock:
            self._day.add(size)
            self._used += size
            self.total += size
        self.tick()
        if not self.hurry:
            self._throttle(size)

    def tick(self) -> None:
        """One more part of what takes as long as it takes is done."""
        self.operations += 1

    # ------------------------------------------------------------------ a day

    def remember(self, size: int) -> None:
        """What writers before this one wrote in the last day."""
        with self._lock:
            self._day.add(size)

    def seconds_until(self, size: int) -> float | None:
        """Until the limit of a day has room for so many bytes; None: it never has."""
        limit = self.limits.disk_bytes_per_day
        with self._lock:
            return self._day.seconds_until(limit, size) if limit else 0.0

    # ------------------------------------------------------------------ the quota

    def expect_base(self, size: int) -> None:
        """The next base will take about so many bytes, going by what is to be written."""
        with self._lock:
            self._expected_base = size

    def measure(self, run: Path, *, next_base: int = 0, may_go: int = 0) -> int:
        """Look how large the directory is. `next_base` is what the next base will take, going by the last
        one, `may_go` what would be free without the bases before the newest."""
        used = directory_bytes(run)
        with self._lock:
            self._used, self._next_base, self._may_go = used, next_base, may_go
        return used

    def check_log(self, run: Path, size: int) -> None:
        """Raise if so many bytes of log have to stay out."""
        quota, free = self.limits.store_quota, shutil.disk_usage(run).free
        with self._lock:
            used, may_go = self._used, self._may_go
            next_base = max(self._next_base, self._expected_base)
        if not log_leaves_room(free, size=size, next_base=next_base):
            raise NotEnoughDisk(
                f"write {words(size)} of log: {words(free)} of the disk are free, and the next base takes "
                f"{words(next_base)}",
                hint="the log goes on behind the next base; make room, or lower keep=Keep(last=…)",
            )
        if not log_has_room(quota, used=used, size=size, next_base=next_base, may_go=may_go):
            raise NotEnoughDisk(
                f"write {words(size)} of log: {words(used)} of store_quota {words(quota)} are used, "
                f"and the next base takes {words(next_base)}",
                hint="the log goes on behind the next base; raise tuning=Tuning(store_quota=…) or lower "
                "keep=Keep(last=…)",
            )
        if self.seconds_until(size) != 0:
            limit = self.limits.disk_bytes_per_day
            raise NotEnoughDisk(
                f"write {words(size)} of log: disk_bytes_per_day allows {words(limit)}, "
                "and these were written in the last 24 hours",
                hint="the log goes on behind the next base that the limit allows; raise it, or log less",
            )

    def lend(self, run: Path, size: int) -> None:
        """Returns when so many bytes may be written that go again at once; raises if there is no room for
        them beside the next base."""
        quota, free = self.limits.store_quota, shutil.disk_usage(run).free
        with self._lock:
            used, next_base = self._used, max(self._next_base, self._expected_base)
        no_room = quota and used + size + next_base > quota
        if free < size + next_base or no_room or self.seconds_until(size) != 0:
            raise NotEnoughDisk(
                f"write {words(size)} to {run} for a moment: {words(free)} are free, limits leave less",
                hint="make room, or raise tuning=Tuning(store_quota=…, disk_bytes_per_day=…)",
            )
        with self._lock:
            self._day.add(size)
            self.total += size
        self._throttle(size)

    def describe(self) -> dict[str, Any]:
        """The limits' part of the status document."""
        with self._lock:
            used, day = self._used, self._day.written
        return {
            **msgspec.structs.asdict(self.limits),
            "store_bytes": used if self.limits.store_quota else None,
            "written_last_day_bytes": day,
            "waited_seconds": self._throttle.waited_seconds,
        }


def directory_bytes(run: Path) -> int:
    total = 0
    for folder, _, names in os.walk(run):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # somebody clears up
                total += Path(folder, name).lstat().st_size
    return total
