"""Starts a shadow in a thread of its own: training does not wait for a process to start."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from everystep.capture.census import LiveCensus
from everystep.connection import Connection
from everystep.core.census import Census
from everystep.errors import EverystepError
from everystep.lane.control import AskRetire


class Started(NamedTuple):
    connection: Connection
    census: Census  # that it was started for

    def send_away(self) -> None:
        """It has recorded nothing."""
        with contextlib.suppress(EverystepError):
            self.connection.shadow.ask(AskRetire(), timeout_seconds=5)
        self.connection.close()


class Starter:
    """Owned by the training thread; `_start` runs in the other one."""

    def __init__(self, connect: Callable[[LiveCensus], Connection]) -> None:
        self._connect = connect
        self._thread: threading.Thread | None = None
        self._result: Started | EverystepError | None = None

    @property
    def busy(self) -> bool:
        """From `begin` until the result is taken."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        return self._result is not None

    def begin(self, live: LiveCensus) -> None:
        thread = threading.Thread(target=self._start, args=(live,), daemon=True)
        thread.start()
        self._thread = thread

    def _start(self, live: LiveCensus) -> None:
        try:
            self._result = Started(self._connect(live), live.census)
        except EverystepError as error:
            self._result = error
        except (OSError, RuntimeError, MemoryError, ValueError) as error:
            self._result = EverystepError(f"start a shadow: {type(error).__name__}: {error}")

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def take(self) -> Started:
        """What was started; raises what went wrong."""
        result, self._result, self._thread = self._result, None, None
        assert result is not None
        if isinstance(result, EverystepError):
            raise result
        return result

    def abandon(self) -> None:
        self.wait()
        if isinstance(self._result, Started):
            self._result.send_away()
        self._result = self._thread = None
