"""Processes that a trainer forks have its hooks and its ring, and may use neither: two writers of one ring
would end recording for both."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import Protocol

log = logging.getLogger("everystep")


class Forked(Protocol):
    def disarm(self) -> None:
        """In the child: give up everything that belongs to the parent, and touch nothing of it."""


class ForkedRecorder:
    """What is left of a recorder in the child: it says once why nothing is recorded."""

    problem = "this process was forked from the trainer, which alone records"

    def __init__(self, run: Path) -> None:
        self._run = run
        self._told = False

    def tell(self) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "everystep: run %s: process %d was forked from its trainer: what it does to model and "
                "optimizer is not recorded",
                self._run,
                os.getpid(),
            )


_armed: weakref.WeakSet[Forked] = weakref.WeakSet()


def disarm_in_forks(holder: Forked) -> None:
    """Have it disarmed in every process that is forked from here on."""
    _armed.add(holder)


def _disarm_all() -> None:
    for holder in list(_armed):
        holder.disarm()
    _armed.clear()


os.register_at_fork(after_in_child=_disarm_all)
