"""The bucket behind the store: two threads ship what the local directory holds, one the bases, one the log.

A bucket that fails is said and tried again, soon at first; nothing else waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everystep.core.trouble import Trouble
from everystep.shadow.base_writer import PersistState
from everystep.shadow.logkeeper import LogKeeper
from everystep.shadow.worker import Worker
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.ship_log import LogShipper
from everystep.store.disk.meter import Throttle

_FAILURES_MAX = 3  # in a row; after that nothing waits for the bucket
_TURN_SECONDS = 0.5  # also the shortest time between two objects of the growing log


class Shipper:
    """Owned by the main thread; each of its workers has a thread of its own. Without a URL nothing runs."""

    def __init__(
        self, run: Path, url: str | None, bytes_per_second: int, log_is_resumed: bool = True
    ) -> None:
        """`log_is_resumed`: whether a resume takes more than bases."""
        self._run, self._url, self._log_is_resumed = run, url, log_is_resumed
        self._bases: BaseShipper | None = None
        self._log: LogShipper | None = None
        self._log_keeper: LogKeeper | None = None
        self._term = 0
        self.base_worker, self.log_worker = Worker("ship_bases"), Worker("ship_log")
        self._throttle = Throttle(bytes_per_second)
        self.check_directory: Callable[[], None] = lambda: None

    def look_after(self, term: int, log_keeper: LogKeeper | None) -> None:
        """Start shipping once we own a term; called repeatedly, to retry threads that could not start."""
        if not self._url or not term:
            return
        self._term, self._log_keeper = term, log_keeper
        if self.base_worker.may_begin:
            self.base_worker.repeat(self._ship_bases, _TURN_SECONDS)
        if log_keeper and self.log_worker.may_begin:
            self.log_worker.repeat(self._ship_log, _TURN_SECONDS)

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
        if self._bases is None or not self._bases.claimed or self.base_worker.trouble.fenced:
            return  # the bucket is, or may be, somebody else's
        if self._log is None:
            self._log = LogShipper(self._bucket(), self._run, self._term, self._throttle)
        self._log.turn(self._log_keeper.end)

    @property
    def _troubles(self) -> tuple[Trouble, Trouble]:
        return self.base_worker.trouble, self.log_worker.trouble

    @property
    def problem(self) -> str:
        return next((f"bucket: {t.problem}" for t in self._troubles if t.problem), "")

    @property
    def _fenced(self) -> bool:
        return any(trouble.fenced for trouble in self._troubles)

    @property
    def hopeless(self) -> bool:
        """Failed again and again: what is not there, the next term ships."""
        return self._fenced or any(t.failures >= _FAILURES_MAX for t in self._troubles)

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
            "retries": sum(t.failures_total for t in self._troubles),
            "last_error": next((t.last for t in self._troubles if t.last), ""),
            "fenced": self._fenced,
        }

    def finish(self, state: PersistState, seconds: float) -> None:
        """Ship the rest, if that is soon done; what is left, the next term ships."""
        deadline = time.monotonic() + seconds
        while self._term and not self.settled(state, tagged=self.has_all_tags()):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        workers = self.base_worker, self.log_worker
        for worker in workers:
            worker.stop()
        for worker in () if self.hopeless else workers:
            worker.wait(deadline - time.monotonic())
