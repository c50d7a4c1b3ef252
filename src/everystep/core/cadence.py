"""When the next base is due, and how soon a failure is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from everystep.option_values import AUTO, duration_seconds
from everystep.options import Options

_ABSURD_SECONDS = 10 * 365 * 86400.0


def age_seconds(written: float, now: float) -> float | None:
    """How old something is that another process wrote, by the wall clock; None: the clock was set meanwhile,
    and nobody knows. Whoever waits for a certain age then waits no longer."""
    age = now - written
    return age if 0 <= age < _ABSURD_SECONDS else None


def base_is_due(
    options: Options, *, step: int, durable_step: int | None, seconds_since_base: float
) -> bool:
    """The first base is due at once: from then on the store always holds something."""
    if durable_step is None:
        return True
    if step <= durable_step:
        return False
    if isinstance(options.durable_every, int):
        return step - durable_step >= options.durable_every
    return seconds_since_base >= duration_seconds("durable_every", options.durable_every)


def until_tuned(options: Options) -> Options:
    """What holds as long as there is no plan."""
    every = Options().durable_every if options.durable_every == AUTO else options.durable_every
    return msgspec.structs.replace(options, durable_every=every)


def seconds_between_bases(options: Options, seconds_per_step: float | None) -> float | None:
    """None: steps are counted, and how long one takes is not known."""
    every = until_tuned(options).durable_every
    if isinstance(every, int):
        return every * seconds_per_step if seconds_per_step else None
    return duration_seconds("durable_every", every)


def recorded_every(every: int | str) -> int | str:
    """What `every="auto"` means: every step is recorded."""
    return 1 if every == AUTO else every


class RestBetweenBases:
    """Between two bases of a run without a log (`every=N`, `every="10m"`). With `every=1` there is none."""

    def __init__(self, every: int | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = recorded_every(every)
        self._clock = clock
        self._began: tuple[int, float] | None = None  # step and time at which the last base began

    @property
    def periodic(self) -> bool:
        return self._every != 1

    def after_base(self, step: int) -> bool:
        """Whether nothing is recorded from here on, now that a base has been sent."""
        if not self.periodic:
            return False
        self._began = self._began or (step, self._clock())
        return True

    def is_over(self, step: int) -> bool:
        """Whether the next base begins at this step; it is then taken to have begun."""
        assert self._began is not None
        at, when = self._began
        if isinstance(self._every, int):
            over = step - at >= self._every
        else:
            over = self._clock() - when >= duration_seconds("every", self._every)
        if over:
            self._began = (step, self._clock())
        return over

    @property
    def why(self) -> str:
        unit = " steps" if isinstance(self._every, int) else ""
        return f"a base every {self._every}{unit}, no log in between (every={self._every!r})"


def retry_seconds(failures: int) -> float:
    """Pause before trying again what just failed: soon at first, then once a minute."""
    return min(60.0, 0.5 * 2.0 ** min(failures, 10))
