"""Work beside the main thread that may fail: that is told, and it is tried again after a pause that grows,
until others have gone on with what it works at. Bases and log have one worker each, the bucket two."""

from __future__ import annotations

import logging
import threading
import time

from everystep.core.trouble import Trouble
from everystep.errors import EverystepError, Fenced
from everystep.shadow.threads import Work, guarded, start_thread

log = logging.getLogger(__name__)


def _nothing() -> None: ...


class Worker:
    """Owned by the main thread. What it is given to do runs in a thread of its own, one piece at a time;
    `trouble` is replaced as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trouble = Trouble()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """It could begin, if need be without a pause after a failure."""
        return not self.busy and not self.trouble.fenced

    @property
    def may_begin(self) -> bool:
        return self.idle and time.monotonic() >= self.trouble.retry_at

    def do(self, work: Work) -> None:
        """In the caller's thread; the outcome is in `trouble`."""

        def well() -> None:
            work()
            self.recovered()

        guarded(well, self._failed)

    def begin(self, work: Work, then: Work = _nothing) -> None:
        """Beside the main thread; `then` comes last, whatever the outcome is."""

        def failed(error: Exception) -> None:
            self._failed(error)
            then()

        def whole() -> None:
            self.do(work)
            then()

        self._thread = start_thread(self.name, whole, failed)

    def repeat(self, work: Work, pause_seconds: float) -> None:
        """Again and again beside the main thread, until it is told to stop, or others have gone on."""

        def turns() -> None:
            while not self._stopping.is_set() and not self.trouble.fenced:
                self.do(work)
                self._stopping.wait(self.trouble.pause_seconds or pause_seconds)

        self._thread = start_thread(self.name, turns, self._failed)

    def stop(self) -> None:
        """Repeat it no more."""
        self._stopping.set()

    def wait(self, seconds: float | None = None) -> None:
        """For what is being done."""
        if self._thread is not None:
            self._thread.join(None if seconds is None else max(0.0, seconds))

    def recovered(self) -> None:
        self.trouble = self.trouble.over()

    def before_it_is_told(self, error: Exception) -> None:
        """What else a failure means to this kind of worker."""

    def _failed(self, error: Exception) -> None:
        self.before_it_is_told(error)
        ours = isinstance(error, OSError | EverystepError)
        said = str(error) if ours else f"{type(error).__name__}: {error}"
        trouble = self.trouble.after(said, time.monotonic(), fenced=isinstance(error, Fenced))
        trace = None if ours else error
        log.error(
            "%s_failed failures=%d error=%s", self.name, trouble.failures, said, exc_info=trace
        )
        self.trouble = trouble
