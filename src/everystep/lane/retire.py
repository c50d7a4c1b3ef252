"""Ending a shadow whose state another one holds now."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from everystep.errors import EverystepError
from everystep.lane.control import AskRetire, ask
from everystep.lane.runtime import ShadowCard, is_alive

_PATIENCE_SECONDS = 5.0


def retire(card: ShadowCard) -> None:
    """Return when that shadow is gone. Two must never use one replica: one that hangs is killed."""
    if is_alive(card):
        with contextlib.suppress(EverystepError):
            ask(card.control, AskRetire(), timeout_seconds=_PATIENCE_SECONDS)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while is_alive(card):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(card.pid, signal.SIGKILL)
        time.sleep(0.002)
