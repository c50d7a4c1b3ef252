"""Ending a shadow whose state another one holds now, or that nobody wants."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from everystep.errors import EverystepError, LaneError, LaneTimeout
from everystep.lane.control import AskRetire, ask
from everystep.lane.host import process_state
from everystep.lane.runtime import ShadowCard, is_alive

_PATIENCE_SECONDS = 5.0
_KILLED_SECONDS = 10.0


def retire(card: ShadowCard) -> None:
    """Return when that shadow is gone. Two must never use one replica: one that hangs is killed, and one that
    even that does not end is told by name."""
    if is_alive(card):
        with contextlib.suppress(EverystepError):
            ask(card.control, AskRetire(), timeout_seconds=_PATIENCE_SECONDS)
    if gone_within(card, _PATIENCE_SECONDS):
        return
    try:
        os.kill(card.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise LaneError(
            f"retire shadow {card.pid}: it does not go, and may not be killed: {error.strerror}",
            hint=f"end it as the user who started it: kill {card.pid}",
        ) from error
    if not gone_within(card, _KILLED_SECONDS):
        raise LaneTimeout(
            f"retire shadow {card.pid}: it lives {_KILLED_SECONDS:g} s after SIGKILL "
            f"(state {process_state(card.pid)})",
            hint="in state D it waits for a disk or a network file system: see to that, then try again",
        )


def gone_within(card: ShadowCard, seconds: float) -> bool:
    """Whether the shadow ends in that time; returns as soon as it has."""
    deadline = time.monotonic() + seconds
    while is_alive(card):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
