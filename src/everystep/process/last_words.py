"""Getting the newest state of a shadow that cannot hand it over: it writes it to the store and leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

from everystep.errors import EverystepError, LaneTimeout
from everystep.lane.control import AskStatus, ask
from everystep.lane.host import shared_bytes
from everystep.lane.runtime import ShadowCard, is_alive, read_card

log = logging.getLogger(__name__)

_STATUS_SECONDS = 2.0
_LEAVE_SECONDS = 10.0
_SLOW_BYTES_PER_SECOND = 50e6  # a disk that takes less is taken for one that hangs


def last_words(card: ShadowCard, reason: str) -> int | None:
    """Return once it has written and left; the step that it said it held, if it said so.

    SIGTERM asks for it: that is understood by shadows of every version.
    """
    held = _held_step(card)
    home = Path(card.control.removeprefix("ipc://")).parent
    listed = _listed(card, home)
    seconds = allowance_seconds(shared_bytes(card.pid))
    log.warning("last_words shadow=%d step=%s reason=%s", card.pid, held, reason)
    if is_alive(card):
        with contextlib.suppress(ProcessLookupError):
            os.kill(card.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    # a shadow takes its card away when all is written; it may still be sending to a bucket then
    while is_alive(card) and _listed(card, home) == listed:
        if time.monotonic() > deadline:
            raise LaneTimeout(
                f"shadow {card.pid}: asked to write its newest step to the store and leave "
                f"({reason}), it still lives after {seconds:.0f} s",
                hint=f"look at {home / 'shadow.log'}; attach again once it is gone, "
                f"or give up what only it holds: kill -9 {card.pid}",
            )
        time.sleep(0.01)
    return held


def allowance_seconds(held_bytes: int) -> float:
    """How long a shadow that holds so much may take to write it and leave."""
    return _LEAVE_SECONDS + held_bytes / _SLOW_BYTES_PER_SECOND


def _listed(card: ShadowCard, home: Path) -> bool:
    now = read_card(home)
    return now is not None and now.pid == card.pid


def _held_step(card: ShadowCard) -> int | None:
    """As its notice board tells; one that tells nothing we understand has no say in what was lost."""
    try:
        status = ask(
            card.control,
            AskStatus(),
            timeout_seconds=_STATUS_SECONDS,
            alive=lambda: is_alive(card),
        ).status
    except (EverystepError, OSError):
        return None
    step = status.get("shadow_step")
    return step if isinstance(step, int) else None
