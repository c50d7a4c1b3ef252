"""Waiting for a shadow to make a step durable: for as long as it gets on with it, and not in silence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everystep.console import announce
from everystep.core.patience import STILL_SECONDS, Patience, Wait
from everystep.core.sizes import size
from everystep.errors import EverystepError, LaneTimeout
from everystep.lane.control import AskStatus, ask
from everystep.lane.host import process_state
from everystep.process.spawn import ShadowHandle

_BOARD_SECONDS = 1.0


class DurableWait:
    """Of one `flush` or `close`; looked at about every second."""

    def __init__(
        self,
        run: Path,
        operation: str,
        step: int,
        shadow: ShadowHandle,
        still: float = STILL_SECONDS,
    ) -> None:
        self._what = f"{operation} {run}"
        self._step, self._shadow = step, shadow
        self._patience = Patience(time.monotonic(), still)

    def look(self) -> None:
        """LaneTimeout once nothing has moved for too long."""
        status = self._status()
        now = time.monotonic()
        verdict = self._patience.look(_sign(status), now)
        if verdict is Wait.TELL:
            announce(
                f"{self._what}: waiting until step {self._step} is written; {self._describe(status)}"
            )
        elif verdict is Wait.OVER:
            pid = self._shadow.pid
            stopped = process_state(pid) == "T"
            raise LaneTimeout(
                f"{self._what}: step {self._step} is not written, and shadow {pid} has done nothing for "
                f"{self._patience.still(now):.0f} s ({self._describe(status)})",
                hint=f"it is stopped: kill -CONT {pid} wakes it"
                if stopped
                else "everystep status tells more; what the shadow holds stays in its memory",
            )

    def _status(self) -> dict[str, Any]:
        try:
            return ask(
                self._shadow.control,
                AskStatus(),
                timeout_seconds=_BOARD_SECONDS,
                alive=lambda: self._shadow.alive,
            ).status
        except EverystepError:
            return {}

    def _describe(self, status: Mapping[str, Any]) -> str:
        if not status:
            return f"shadow {self._shadow.pid} does not answer"
        written = size((status.get("limits") or {}).get("written_last_day_bytes") or 0)
        return (
            f"it has replayed step {status.get('replayed_step')}, written step {status.get('durable_step')}, "
            f"{written} in all{': ' + status['problem'] if status.get('problem') else ''}"
        )


def _sign(status: Mapping[str, Any]) -> object:
    """What changes while a shadow replays, writes or ships; None: it does not say."""
    if not status:
        return None
    limits, bucket = status.get("limits") or {}, status.get("bucket") or {}
    return (
        *(status.get(name) for name in ("records", "based_atoms", "durable_step", "bases_written")),
        status.get("store_operations"),
        *(limits.get(name) for name in ("written_last_day_bytes", "waited_seconds")),
        *(bucket.get(name) for name in ("sent_bytes", "retries", "step")),
    )
