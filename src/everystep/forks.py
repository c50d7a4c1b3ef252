"""Processes that a trainer forks have its hooks and its ring, and may use neither: two writers of one ring
would end recording for both."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    def disarm(self) -> None:
        """In the child: let go of everything that belongs to the parent, and touch nothing of it."""


_armed: weakref.WeakSet[Forked] = weakref.WeakSet()


def disarm_in_forks(holder: Forked) -> None:
    """Have it disarmed in every process that is forked from here on."""
    _armed.add(holder)


def _disarm_all() -> None:
    for holder in list(_armed):
        holder.disarm()
    _armed.clear()


os.register_at_fork(after_in_child=_disarm_all)
