"""When the next base is due, and how soon a failure is tried again."""

from __future__ import annotations

from everystep.options import Options, duration_seconds


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


def retry_seconds(failures: int) -> float:
    """Pause before trying again what just failed: soon at first, then once a minute."""
    return min(60.0, 0.5 * 2.0 ** min(failures, 10))
