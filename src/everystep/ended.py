"""What has become of a Run, and what a call of an ended one is told."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from everystep.errors import UsageError


class End(StrEnum):
    NONE = "none"
    CLOSED = "closed"
    BY_LATER = "ended by a later attach of this process"
    FORKED = "left to the process that this one was forked from"

    def check(self, run: Path) -> None:
        """UsageError unless the run is open."""
        if self is End.BY_LATER:
            raise UsageError(
                f"run {run}: it was closed by a later attach in this process",
                hint="go on with the Run that attach returned last",
            )
        if self is End.FORKED:
            raise UsageError(
                f"run {run}: this process was forked from the trainer, which alone may go on with it",
                hint="train in the process that attached, or leave the loop where you fork",
            )
        if self is End.CLOSED:
            raise UsageError(f"run {run}: it is closed", hint="attach again")
