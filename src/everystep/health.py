"""What recording costs and what is wrong with it, told in the trainer: before a crash nobody asks for it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from everystep.core.alarm import Alarm
from everystep.core.slowdown import Slowdown

log = logging.getLogger("everystep")

_LESS = (
    "every=10, or every='1m', records less often; give attach a compiled model as it is called; "
    "steps of a few milliseconds cost most"
)


class Health:
    """Of one run, since attach. Owned by the training thread."""

    def __init__(self, path: Path, budget_percent: float) -> None:
        self._path = path
        self._alarm = Alarm()
        self._slowdown = Slowdown(budget_percent)
        self._host_seconds = 0.0  # that our code took of the training thread since the last seal
        self._lost_seconds = 0.0  # that training had to wait for

    def spent(self, seconds: float) -> None:
        """Our code took so long on the training thread."""
        self._host_seconds += seconds

    def sealed(self, step: int, *, was_idle: bool, is_idle: bool, device: float) -> None:
        """A step was recorded. Our time on the host is lost to training while the device has no work: it was
        idle before, or is now. `device`: seconds that it has waited for copies since attach."""
        # a device that runs out of work waits for the host; one that did so meanwhile, for half of it
        share = (was_idle + 1) / 2 if is_idle else 0.0
        own, self._host_seconds = self._host_seconds, 0.0
        self._lost_seconds += share * own
        self._slowdown.sealed(time.monotonic(), self._lost_seconds + device)
        if told := self._slowdown.warning():
            log.warning("everystep: run %s, step %d: %s; %s", self._path, step, told, _LESS)

    def skip(self) -> None:
        """A step beside a base, or one that is not recorded."""
        self._host_seconds = 0.0
        self._slowdown.skip()

    @property
    def slowdown_percent(self) -> float | None:
        """By how much recording slows training down, as far as the trainer can measure it; None: not yet."""
        return self._slowdown.percent

    def tell(self, step: int, trouble: str) -> None:
        """`trouble` is empty while all is well."""
        if told := self._alarm.look(trouble, time.monotonic()):
            log.warning(
                "everystep: run %s, step %d: %s; `everystep status %s` tells more",
                self._path,
                step,
                told,
                self._path,
            )
