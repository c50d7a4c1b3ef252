"""How often something fails here: from the history of a run, weighed with what is usual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

USUAL_SECONDS = 86400.0


class Life(NamedTuple):
    """Of one term."""

    seconds: float
    failed: bool  # neither did it end well nor does it still live


class Mtbf(NamedTuple):
    seconds: float
    why: str


def mean_time_between_failures(lives: Sequence[Life]) -> Mtbf:
    """A short history says little: one failure a day is counted beside it."""
    hours = sum(life.seconds for life in lives) / 3600
    failures = sum(life.failed for life in lives)
    seconds = (USUAL_SECONDS + 3600 * hours) / (1 + failures)
    if not failures and 3600 * hours < USUAL_SECONDS:
        return Mtbf(USUAL_SECONDS, "assumed: the run has not failed yet")
    return Mtbf(
        seconds, f"{failures} failures in {hours:.1f} h of this run, weighed with one a day"
    )
