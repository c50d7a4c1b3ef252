"""Times of iterations: between marks on the compute stream, or of the host without a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def timed(cuda: bool, turn: Callable[[], object], goes_on: Callable[[int], bool]) -> list[float]:
    """Seconds of each turn, as long as `goes_on(turns so far)`."""
    if cuda:
        torch.cuda.synchronize()
    clock, count = Clock(cuda), 0
    while goes_on(count):
        turn()
        clock.tick()
        count += 1
    return clock.seconds()


def summary(seconds: list[float]) -> dict[str, float]:
    return {
        "steps": len(seconds),
        "median_seconds": statistics.median(seconds),
        "mean_seconds": statistics.mean(seconds),
        "max_seconds": max(seconds),
        "slowest_step": seconds.index(max(seconds)),
    }
