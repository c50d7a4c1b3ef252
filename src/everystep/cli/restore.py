"""`everystep restore`: where the next attach begins. Nothing is copied: an epoch is claimed that goes on from
that step, and what was written behind it no longer counts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from everystep.core.retention import Rules
from everystep.errors import EverystepError, ProtocolMismatch, RunBusy, StepUnavailable
from everystep.lane.control import AskRetire, ask
from everystep.lane.runtime import ShadowCard, is_alive
from everystep.recover.find import find_newest
from everystep.recover.meet import hold_run, shadow_of
from everystep.store.runs import claim_epoch, newest_manifest

_LEAVE_SECONDS = 30.0


def restore_to(run: Path, step: int) -> dict[str, Any]:
    """Refused while somebody trains; a shadow that waits for its trainer goes, with what it holds."""
    folder, lock = hold_run(run, "restore")
    try:
        found, _ = find_newest(run, None, step)
        if found is None:
            raise StepUnavailable(
                f"restore {run} to step {step}: its base is damaged",
                hint="everystep verify lists the steps that are left",
            )
        newest = newest_manifest(run)
        manifest = claim_epoch(run, found.point, newest.rules if newest else Rules())
        card = shadow_of(run, folder)
        if card is not None and is_alive(card):  # from here on it cannot write any more
            _dismiss(card, run)
        again, _ = find_newest(run, None)
        if again is None or again.point.step != step:
            raise StepUnavailable(
                f"restore {run} to step {step}: what it needs was removed meanwhile",
                hint="everystep ls lists the steps that are left",
            )
        return {
            "run": str(run),
            "step": found.point.step,
            "epoch": manifest.epoch,
            "redone_from_the_log": len(found.log),
            "problems": found.problems,
        }
    finally:
        lock.close()


def _dismiss(card: ShadowCard, run: Path) -> None:
    try:
        ask(card.control, AskRetire(), timeout_seconds=_LEAVE_SECONDS)
    except ProtocolMismatch:  # a signal is understood by every version
        with contextlib.suppress(ProcessLookupError):
            os.kill(card.pid, signal.SIGTERM)
    except EverystepError:
        pass  # it may be gone before it has answered
    deadline = time.monotonic() + _LEAVE_SECONDS
    while is_alive(card):
        if time.monotonic() > deadline:
            raise RunBusy(
                f"restore {run}: its shadow {card.pid} does not go",
                hint=f"look at its log, or end it: kill {card.pid}",
            )
        time.sleep(0.02)
