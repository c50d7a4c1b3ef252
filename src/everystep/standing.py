"""Where in a run's lineage a trainer stands, and how far it has seen the run."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from everystep.errors import StoreError
from everystep.format.base import Point
from everystep.lane.runtime import ShadowCard
from everystep.store.home import known_run
from everystep.store.layout import term_numbers
from everystep.store.runs import Known

_HANDED_MAX = 8  # attaches in a row that claimed no term


class Place(NamedTuple):
    """What a shadow is told of it."""

    step: int
    run_id: str  # of the run that the directory has held since attach; empty: none yet
    continues: Point | None
    known: Known


class Start(NamedTuple):
    """Where training stands when recording begins."""

    step: int
    point: Point | None  # of the store, which this goes on from
    versions: Sequence[int]  # of all atoms


class Standing:
    """Owned by the training thread. The thread that starts a shadow beside it is given a copy, and hands that
    back (`starter.py`)."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._run_id = ""
        self._attach = secrets.token_hex(8)
        self._known = Known(0, (self._attach,))
        self._handed: tuple[str, ...] = ()  # attaches whose state our newest shadow was handed
        self.point: Point | None = (
            None  # what was resumed, or the newest that a shadow of ours has claimed
        )

    def look(self) -> None:
        """What is found in the run from here on is all there is; who claims a term later fences us."""
        self._known = self._known._replace(term=max(term_numbers(self._run), default=0))

    def follow(self, step: int) -> None:
        """A shadow that died may have claimed a term and written to it: that goes on counting."""
        with contextlib.suppress(StoreError, OSError):  # whoever claims looks again
            self.point = self._known_at(step).place(self._run, self.point)

    def go_back(self) -> None:
        """To a point of the store: what a shadow of ours has written so far lies on the line that is left."""
        left = (*self._known.left, self._attach, *self._handed)
        self._known, self._handed = self._known._replace(left=left), ()
        self._attach = secrets.token_hex(8)

    def at(self, step: int, predecessor: ShadowCard | None) -> Place:
        """For a shadow that begins there, and may be handed a replica."""
        self._run_id = known_run(self._run) or self._run_id
        if predecessor is not None:
            known = {*self._known.left, *self._handed, self._attach}
            self._handed += tuple(a for a in _handed_on(predecessor) if a not in known)
        return Place(step, self._run_id, self.point, self._known_at(step))

    def _known_at(self, step: int) -> Known:
        return self._known._replace(attaches=(self._attach, *self._handed), step=step)


def _handed_on(predecessor: ShadowCard) -> tuple[str, ...]:
    """Attaches whose term may be the newest one there is, or lie on the way to it. A shadow that was asked
    for its state before it had claimed a term may have one by now: those before it count all the same."""
    return predecessor.attaches[:_HANDED_MAX]
