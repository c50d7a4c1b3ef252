"""The bucket behind the store: two threads ship what the local directory holds, one the bases, one the log.

A bucket that fails is said and tried again, soon at first; nothing else waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everystep.core.cadence import retry_seconds
from everystep.errors import EverystepError, Fenced
from everystep.shadow.base_writer import PersistState
from everystep.shadow.logkeeper import LogKeeper
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.ship_log import LogShipper
from everystep.store.disk.meter import Throttle

log = logging.getLogger(__name__)

_FAILURES_MAX = 3  # in a row: then nobody waits for the bucket
_TURN_SECONDS = 0.5  # also how often the growing log becomes a new object, at most


class Shipper:
    """Owned by the main thread; every `_Carrier` runs in a thread of its own. Without a URL nothing does."""

    def __init__(
        self, run: Path, url: str | None, bytes_per_second: int, log_is_resumed: bool = True
    ) -> None:
        """`log_is_resumed`: whether a resume takes more than bases."""
        self._run, self._url, self._log_is_resumed = run, url, log_is_resumed
        self._bases: BaseShipper | None = None
        self._log: LogShipper | None = None
        self._log_keeper: LogKeeper | None = None
        self._term = 0
        self._carriers = [_Carrier("bases", self._ship_bases), _Carrier("log", self._ship_log)]
        self._throttle = Throttle(bytes_per_second)
        self.check_directory: Callable[[], None] = lambda: None

    def look_after(self, term: int, log_keeper: LogKeeper | None) -> None:
        """Begin once a term is ours."""
        if self._url and term and not self._term:
            self._term, self._log_keeper = term, log_keeper
            for carrier in self._carriers if log_keeper else self._carriers[:1]:
                carrier.start()

    def _bucket(self) -> Bucket:
        assert self._url is not None
        return Bucket(self._url)

    def _ship_bases(self) -> None:
        self.check_directory()
        if self._bases is None:
            self._bases = BaseShipper(self._bucket(), self._run, self._term, self._throttle)
        self._bases.turn()

    def _ship_log(self) -> None:
        assert self._log_keeper is not None
        self.check_directory()
        if self._bases is None or not self._bases.claimed or self._carriers[0].fenced:
            return  # the bucket is, or may be, somebody else's
        if self._log is None:
            self._log = LogShipper(self._bucket(), self._run, self._term, self._throttle)
        self._log.turn(self._log_keeper.end)

    @property
    def problem(self) -> str:
        return next((f"bucket: {c.problem}" for c in self._carriers if c.problem), "")

    @property
    def _fenced(self) -> bool:
        return any(carrier.fenced for carrier in self._carriers)

    @property
    def hopeless(self) -> bool:
        """Failed again and again: what is not there, the next term ships."""
        return any(c.fenced or c.failures >= _FAILURES_MAX or c.died for c in self._carriers)

    def settled(self, state: PersistState, *, tagged: bool) -> bool:
        """Nothing is left to wait for. `tagged`: the bucket was seen to have every tag."""
        return self._url is None or self.hopeless or self.caught_up(state, tagged=tagged)

    def has_all_tags(self) -> bool:
        """Reads the directory."""
        return self._bases is None or self._bases.has_all_tags

    def caught_up(self, state: PersistState, *, tagged: bool) -> bool:
        """The bucket holds what the directory holds."""
        newest = self._bases.newest if self._bases else None
        logged = self._log_keeper.step if self._log_keeper else None
        shipped = self._log.step if self._log else None
        based = state.durable is None or (newest is not None and newest.point == state.durable)
        return based and tagged and (logged is None or shipped == logged)

    def step(self, state: PersistState) -> int | None:
        """The newest step that the bucket alone would bring back; None: there is nothing, or others go on
        with it."""
        newest = self._bases.newest if self._bases else None
        if newest is None or self._fenced:
            return None
        step = newest.entry.step
        shipped = self._log.step if self._log else None
        if shipped is None or self._log_keeper is None or newest.point != state.durable:
            return step
        if not self._log_is_resumed:
            return step
        return max(step, min(shipped, self._log_keeper.reaches(step)))

    def describe(self, state: PersistState, durable_step: int | None) -> dict[str, Any] | None:
        if self._url is None:
            return None
        step = self.step(state)
        shippers = [s for s in (self._bases, self._log) if s is not None]
        return {
            "url": self._url,
            "step": step,
            "behind_steps": None if step is None or durable_step is None else durable_step - step,
            "behind_bytes": sum(s.behind_bytes for s in shippers),
            "sent_bytes": self._throttle.total,
            "retries": sum(c.failures_total for c in self._carriers),
            "last_error": next((c.last_error for c in self._carriers if c.last_error), ""),
            "fenced": self._fenced,
        }

    def finish(self, state: PersistState, seconds: float) -> None:
        """Ship the rest, if that is soon done; what is left, the next term ships."""
        deadline = time.monotonic() + seconds
        while self._term and not self.settled(state, tagged=self.has_all_tags()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for carrier in self._carriers:
            carrier.stopping.set()
        for carrier in () if self.hopeless else self._carriers:
            carrier.wait(deadline - time.monotonic())


class _Carrier:
    """Does one kind of work again and again, in a thread; a failure makes it wait longer."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name=f"ship_{name}", daemon=True)
        self.stopping = threading.Event()
        self.last_error = ""
        self.failures = 0  # since the last success
        self.failures_total = 0
        self.fenced = False
        self._problem = ""

    @property
    def died(self) -> bool:
        """Of an error that nobody foresaw; its trace is in the shadow's log."""
        begun = self._thread.ident is not None and not self.stopping.is_set()
        return begun and not self.fenced and not self._thread.is_alive()

    @property
    def problem(self) -> str:
        return f"{self._thread.name} has died, see shadow.log" if self.died else self._problem

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(max(0.0, seconds))

    def _run(self) -> None:
        while not self.stopping.is_set() and not self.fenced:
            try:
                self._work()
                self.failures, self._problem = 0, ""
            except (OSError, EverystepError) as error:
                self.failures += 1
                self.failures_total += 1
                self._problem = self.last_error = str(error)
                self.fenced = isinstance(error, Fenced)
                log.error("%s_failed failures=%d %s", self._thread.name, self.failures, error)
            pause = retry_seconds(self.failures) if self.failures else _TURN_SECONDS
            self.stopping.wait(pause)
