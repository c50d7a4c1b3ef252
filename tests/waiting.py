"""Bounded waits: what does not come in time is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
WAIT_SECONDS = 60.0


def wait_until(
    done: Callable[[], T], what: str, seconds: float = WAIT_SECONDS, pause: float = 0.01
) -> T:
    """What `done` returns, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(pause)
    return found


def status_when(
    run: Any,
    reached: Callable[[dict[str, Any]], object],
    seconds: float = WAIT_SECONDS,
    pause: float = 0.02,
) -> dict[str, Any]:
    """The status of a run, once that is so."""
    deadline = time.monotonic() + seconds
    while not reached(status := run.status()):
        assert time.monotonic() < deadline, status
        time.sleep(pause)
    return dict(status)
