"""How much bases slow training down, judged by the steps around each of them: drift cancels out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

_NEIGHBOURS = 8  # quiet steps on each side


class MeasuredSlowdown(NamedTuple):
    percent: float
    standard_error: float  # in points


def seconds_lost(
    seconds: Sequence[float], ended: float, spans: Sequence[tuple[float, float]]
) -> list[float]:
    """For every span of writing, what its steps took beyond the quiet ones around it. The last step ended at
    `ended`."""
    ends = [ended - rest for rest in accumulate(reversed(seconds), initial=0.0)][::-1][1:]
    busy = [
        any(begin < end and end - step < stop for begin, stop in spans)
        for step, end in zip(seconds, ends, strict=True)
    ]
    lost = []
    for is_busy, steps in groupby(range(len(seconds)), busy.__getitem__):
        own = list(steps)
        before = [s for s in range(own[0]) if not busy[s]][-_NEIGHBOURS:]
        after = [s for s in range(own[-1] + 1, len(seconds)) if not busy[s]][:_NEIGHBOURS]
        if is_busy and (before or after):
            quiet = statistics.mean(seconds[s] for s in (*before, *after))
            lost.append(sum(seconds[s] for s in own) - len(own) * quiet)
    return lost


def measured_slowdown(lost: Sequence[float], total_seconds: float) -> MeasuredSlowdown:
    """Of all the time that training would have taken."""
    alone = total_seconds - sum(lost)
    spread = statistics.stdev(lost) * math.sqrt(len(lost)) if lost[1:] else math.inf
    return MeasuredSlowdown(100 * sum(lost) / alone, 100 * spread / alone)
