"""Looks at the run's directory, in a thread of its own: a file system that hangs must not stop replay, and
with it training. All others use the newest `state`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from everystep.shadow.threads import guarded, start_thread

_LOOK_SECONDS = 1.0
_HANGS_SECONDS = 10.0


class DirectoryState(NamedTuple):
    lost: str = ""  # what became of the directory, in words
    tagged: bool = True  # the bucket has every tag that is there


class DirectoryWatch:
    def __init__(self, look: Callable[[], DirectoryState]) -> None:
        self._look = look
        self.state = DirectoryState()
        self._asked = self._answered = 0
        self._wake = threading.Event()
        self._began_at: float | None = None
        self._thread: threading.Thread | None = None

    def keep_watch(self) -> None:
        """Called now and then by the main thread: starts the thread, again if that failed or if it ended."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = start_thread("directory-watch", self._watch, self._failed)

    def ask(self) -> int:
        """Have a look now; `has_answered` tells when it is done. Main thread only."""
        self._asked += 1
        self._wake.set()
        return self._asked

    def has_answered(self, number: int) -> bool:
        """Whether what was seen is as new as that question."""
        return self._answered >= number

    @property
    def problem(self) -> str:
        began = self._began_at
        if began is None or time.monotonic() - began < _HANGS_SECONDS:
            return ""
        return f"the file system of the run has not answered for more than {_HANGS_SECONDS:g} s"

    def look(self) -> None:
        """In the caller's thread, which may have met trouble first."""
        guarded(self._look_once, self._failed)

    def _watch(self) -> None:
        while True:
            number, self._began_at = self._asked, time.monotonic()
            self.look()
            self._answered, self._began_at = number, None
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()

    def _look_once(self) -> None:
        self.state = self._look()

    def _failed(self, error: Exception) -> None:
        self.state = DirectoryState(
            f"run directory cannot be looked at ({type(error).__name__}: {error})", False
        )
