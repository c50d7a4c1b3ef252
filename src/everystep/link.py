"""A trainer's link to its shadow: the one it records into, the one being started, and why there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from everystep.connection import Connection
from everystep.core.outage import Outage
from everystep.errors import EverystepError, ShadowLost
from everystep.format.base import Point
from everystep.lane.control import Answer, AskLeave, AskRetire, AskStatus, Request
from everystep.lane.runtime import ShadowCard, read_card
from everystep.options import Options
from everystep.process.spawn import ShadowHandle
from everystep.starter import Starter


class Link:
    """Owned by the training thread."""

    def __init__(self, path: Path, folder: Path, options: Options, document_bytes: int) -> None:
        self.path, self.folder = path, folder
        self.connection: Connection | None = None
        self.starter = Starter(path, folder, options, document_bytes)
        self.outage = Outage()

    @property
    def problem(self) -> str:
        return self.outage.problem

    @property
    def shadow(self) -> ShadowHandle:
        if self.connection is None:
            raise ShadowLost(f"run {self.path}: no shadow at the moment ({self.problem})")
        return self.connection.shadow

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Answer:
        return self.shadow.ask(request, timeout_seconds=timeout_seconds, meanwhile=meanwhile)

    def card(self) -> ShadowCard | None:
        """The card of our own shadow, once it speaks for the run."""
        card = read_card(self.folder)
        ours = self.connection.shadow.pid if self.connection else 0
        return card if card is not None and card.pid == ours else None

    def notice(self) -> str:
        """What is wrong with the shadow, in its own words."""
        return self.connection.ring.notice if self.connection else ""

    def may_begin(self) -> bool:
        """Whether it is time to have a shadow started."""
        return not self.starter.busy and self.outage.may_retry(time.monotonic())

    # ------------------------------------------------------------------ giving it up

    def predecessor(self, step: int) -> ShadowCard | None:
        """Who hands over to a shadow that begins at this step, because ours does not fit any more."""
        speaks = self.card()
        if self.connection is None or not self.connection.shadow.alive:
            return speaks
        term = self.ask(AskStatus(exact=True), 30).status.get("term")
        if term:
            self.starter.standing.point = Point(term, step)
        if speaks is not None:
            return speaks
        # unless ours takes over now, the one before it still speaks
        refused = self.ask(AskRetire(unless_speaking=True), 30).error
        return self.card() if refused else self.connection.predecessor

    def retire_unspoken(self) -> None:
        """Before our shadow took over from another one, nobody needs it."""
        if self.connection is not None and self.connection.predecessor is not None:
            with contextlib.suppress(EverystepError):
                self.connection.shadow.ask(AskRetire(unless_speaking=True), timeout_seconds=2)

    def dismiss(self) -> None:
        """The shadow writes what it has, and waits for the next trainer."""
        with contextlib.suppress(EverystepError):
            self.ask(AskLeave(), 5)

    def close(self) -> None:
        """Give the ring up; the shadow keeps its own hold on it."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
