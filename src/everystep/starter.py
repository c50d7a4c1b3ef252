"""Starts shadows: at once, or in a thread, because training does not wait for a process to start."""

from __future__ import annotations

import contextlib
import os
import threading
from copy import copy
from pathlib import Path
from typing import NamedTuple

from everystep.capture.census import LiveCensus
from everystep.connection import Connection, connect
from everystep.core.census import Census
from everystep.core.pace import replay_threads
from everystep.errors import EverystepError
from everystep.lane.control import AskRetire
from everystep.lane.runtime import ShadowCard, read_card
from everystep.options import Options
from everystep.recover.point import RestorePoint
from everystep.standing import Standing

_DOCUMENT_SLACK_BYTES = 16 << 10


class Started(NamedTuple):
    connection: Connection
    census: Census  # that it was started for

    def send_away(self) -> None:
        """It has recorded nothing."""
        with contextlib.suppress(EverystepError):
            self.connection.shadow.ask(AskRetire(), timeout_seconds=5)
        self.connection.close()


class _Result(NamedTuple):
    """What the thread hands over, all at once and as the last thing it does."""

    outcome: Started | EverystepError
    standing: Standing


class Starter:
    """Owned by the training thread, but for `_work`: the other thread is given what it needs, and writes
    nothing but its result."""

    def __init__(self, run: Path, folder: Path, options: Options, document_bytes: int) -> None:
        self.standing = Standing(run)
        self._run, self._folder, self._options = run, folder, options
        self._document_bytes = document_bytes + _DOCUMENT_SLACK_BYTES
        self._thread: threading.Thread | None = None
        self._result: _Result | None = None

    def make_room(self, document_bytes: int) -> None:
        """For user state of so many bytes."""
        self._document_bytes = max(self._document_bytes, document_bytes + _DOCUMENT_SLACK_BYTES)

    def enlarge(self, need_bytes: int) -> None:
        """A record was too large for its slot: the next ring has larger ones."""
        self._document_bytes = max(2 * self._document_bytes, need_bytes + _DOCUMENT_SLACK_BYTES)

    def start(
        self,
        live: LiveCensus,
        step: int,
        predecessor: ShadowCard | None,
        found: RestorePoint | None = None,
    ) -> Connection:
        """A shadow that begins at this step; a replica that was found in memory is handed on to it."""
        return self._start(self.standing, live, step, predecessor, found)

    def _start(
        self,
        standing: Standing,
        live: LiveCensus,
        step: int,
        predecessor: ShadowCard | None,
        found: RestorePoint | None,
    ) -> Connection:
        return connect(
            self._run,
            self._folder,
            live.census,
            live.powers,
            self._options,
            replay_threads=replay_threads(len(os.sched_getaffinity(0))),
            document_bytes=self._document_bytes,
            unmoved_bytes=live.unmoved_bytes,
            place=standing.at(step, predecessor),
            found=found,
            predecessor=predecessor,
        )

    # ------------------------------------------------------------------ beside training

    @property
    def busy(self) -> bool:
        """From `begin` until the result is taken."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        return self._result is not None

    def begin(self, live: LiveCensus, step: int) -> None:
        given = (live, step, copy(self.standing))
        thread = threading.Thread(target=self._work, args=given, daemon=True)
        thread.start()
        self._thread = thread

    def _work(self, live: LiveCensus, step: int, standing: Standing) -> None:
        try:
            standing.follow(step)
            # a shadow that still speaks for the run goes when the new one holds the state
            connection = self._start(standing, live, step, read_card(self._folder), None)
            outcome: Started | EverystepError = Started(connection, live.census)
        except EverystepError as error:
            outcome = error
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            outcome = EverystepError(f"start a shadow: {type(error).__name__}: {error}")
        self._result = _Result(outcome, standing)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Started:
        """What was started; raises what went wrong."""
        outcome = self._take_over()
        assert outcome is not None
        if isinstance(outcome, EverystepError):
            raise outcome
        return outcome

    def abandon(self) -> None:
        self.wait()
        outcome = self._take_over()
        if isinstance(outcome, Started):
            outcome.send_away()

    def _take_over(self) -> Started | EverystepError | None:
        result, self._result, self._thread = self._result, None, None
        if result is None:
            return None
        self.standing = result.standing
        return result.outcome
