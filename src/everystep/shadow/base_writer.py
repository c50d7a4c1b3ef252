"""Bases to the store, by a thread of their own, from a snapshot that nobody changes."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from everystep.core.cadence import age_seconds
from everystep.core.census import Census
from everystep.core.events import GRADIENT
from everystep.core.retention import Rules
from everystep.core.tensors import Held
from everystep.errors import EverystepError, StoreError
from everystep.format.base import Base, BaseEntry, Point
from everystep.format.log import census_digest
from everystep.shadow.disk_forecast import DiskForecast
from everystep.shadow.spans import Spans
from everystep.shadow.worker import Worker
from everystep.store.disk.files import RunPath
from everystep.store.disk.meter import Meter
from everystep.store.history import written_lately
from everystep.store.home import PUT_BACK, what_is_lost
from everystep.store.log_reader import LogReader
from everystep.store.runs import Known, read_lineage
from everystep.store.snapshot import Snapshot
from everystep.store.term import TermWriter

log = logging.getLogger(__name__)


class PersistState(msgspec.Struct):
    """What the writer last did; replaced as a whole, read by the main thread."""

    term: int = 0
    durable: Point | None = None
    reached: int = 0  # the step that base and log brought back when the term was claimed
    durable_at: float = -math.inf  # by this process's monotonic clock; before all times: not known
    bytes_written: int = 0
    write_bytes_per_second: float = 0.0  # of the newest base
    bases: int = 0  # written beside the main thread
    write_seconds: float = 0.0  # that they took: copy, commit, clearing up

    @property
    def durable_age_seconds(self) -> float:
        """Without end if nobody knows."""
        return time.monotonic() - self.durable_at


class BaseWriter(Worker):
    """Owned by the main thread; `_write` runs in the writer's thread, one at a time."""

    def __init__(
        self,
        run: Path,
        continues: Point | None,
        rules: Rules,
        run_id: str = "",
        meter: Meter | None = None,
        known: Known | None = None,
    ) -> None:
        """`run_id`: what the directory held at attach; empty: nothing, so that the run may be made."""
        super().__init__("base")
        self._known = known
        self._run = run
        self._expected = run_id
        self.meter = meter or Meter()
        self._continues = continues
        self._rules = rules
        self._claimed: TermWriter | None = None
        self._writer: TermWriter | None = None  # the same, once `state` tells of it
        self._landed = False
        self.spans = Spans()
        self.started = time.monotonic()
        self._versions_of: Base | None = None
        self._looked_at: Base | None = None
        self._fits = False
        self._versions: dict[int, int] = {}
        self.disk_forecast: DiskForecast | None = None
        self.on_failure: Callable[[], None] = lambda: None  # it may be the first to see trouble
        self.ended_log: Callable[[], tuple[RunPath, int] | None] = lambda: None
        self.state = _state_of_store(run, continues)

    @property
    def reads_snapshot(self) -> bool:
        """Until the base counts; reading it back and removing others needs the snapshot no more."""
        return self.busy and not self._landed

    @property
    def clears_up(self) -> bool:
        """A base counts, and what it leaves unneeded is removed just now."""
        return self.busy and self._landed

    @property
    def why_no_term(self) -> str:
        """Why there is no term of ours to write to, once that was tried."""
        return "" if self.state.term else self.trouble.problem

    @property
    def run_id(self) -> str:
        """Empty until a term was claimed."""
        return self._writer.manifest.run_id if self._writer else ""

    def what_is_lost(self) -> str:
        """What became of the run's directory, if it is not the one we write to any more."""
        run_id = self.run_id or self._expected
        return what_is_lost(self._run, run_id, self.state.term, os.getpid()) if run_id else ""

    def check_directory(self) -> None:
        """Raise rather than write where the run was, or into another one."""
        lost = self.what_is_lost()
        if lost:
            raise StoreError(lost, hint=PUT_BACK)

    def base_fits(self, census: Census) -> bool:
        """Whether the newest base, if any, is of this model: what is logged can be replayed behind it."""
        newest = self._writer.previous if self._writer else None
        if newest is not None and newest is not self._looked_at:  # asked at every turn of the loop
            self._looked_at, self._fits = (
                newest,
                census_digest(newest.census) == census_digest(census),
            )
        return newest is None or self._fits

    def claim(self) -> None:
        """Take a term if the store lets us; called again before every write until it does."""
        self.do(self._claim)

    def begin_claim(self) -> None:
        """The same beside the main thread."""
        self._landed = True  # no snapshot is read
        self.begin(self._claim)

    def start(self, snapshot: Snapshot, before: Callable[[], None] | None = None) -> None:
        """Write beside the main thread, once `before` has made the snapshot what it should be. Nobody may
        change its bytes until that is done."""
        self._landed = False
        self.spans.begin()
        self.begin(lambda: self._prepare_and_write(snapshot, before), then=self.spans.end)

    def _prepare_and_write(self, snapshot: Snapshot, before: Callable[[], None] | None) -> None:
        began = time.monotonic()
        if before is not None:
            before()
        self._write(snapshot)
        self.state = msgspec.structs.replace(
            self.state,
            bases=self.state.bases + 1,
            write_seconds=self.state.write_seconds + time.monotonic() - began,
        )

    def is_new(self, tensor: Held, census: Census) -> bool:
        """Bytes that the store already has are not written, so they need no copy."""
        return self.version_of(tensor.atom, census) != tensor.version

    def write_now(self, snapshot: Snapshot) -> None:
        """Write in the caller's thread."""
        self.meter.hurry = True
        self.wait()
        self.do(lambda: self._write(snapshot))

    def version_of(self, atom: int, census: Census) -> int | None:
        """The version of an atom in the newest base: an equal one need not be copied again."""
        previous = self._writer.previous if self._writer else None
        if previous is None or previous.census.atoms != census.atoms:
            return None
        if self._versions_of is not previous:
            own = (t for t in previous.tensors if t.slot != GRADIENT)
            self._versions = {t.atom: t.version for t in own}
            self._versions_of = previous
        return self._versions.get(atom)

    def say_closed(self) -> None:
        """The trainer ended well: this term is no failure in the run's history."""
        if self._writer is not None and not self.busy:
            self.do(self._close)

    def _close(self) -> None:
        self.check_directory()
        assert self._writer is not None
        self._writer.close()

    def _claim(self) -> None:
        self.check_directory()
        if self._writer is not None:
            return
        # a term that was claimed is kept, but is ours only once all is known that we say of it
        writer = self._claimed = self._claimed or TermWriter(
            self._run,
            self._continues,
            self._rules,
            meter=self.meter,
            known=self._known,
            ended_log=lambda: self.ended_log(),
        )
        written = written_lately(self._run, writer.manifest.term)
        newest = writer.previous
        state = msgspec.structs.replace(
            self.state,
            term=writer.manifest.term,
            durable=newest.point if newest else None,
            durable_at=_monotonic(newest.document.time) if newest else -math.inf,
            reached=_reached(self._run, newest) if newest else 0,
        )
        self.meter.remember(written)
        self._writer, self.state = writer, state

    def _write(self, snapshot: Snapshot) -> None:
        self._claim()
        assert self._writer is not None
        began = time.monotonic()
        entry: BaseEntry = self._writer.commit(snapshot)
        seconds = time.monotonic() - began
        log.info(
            "base_committed step=%d bytes=%d seconds=%.3f", entry.step, entry.new_bytes, seconds
        )
        self.state = msgspec.structs.replace(
            self.state,
            durable=Point(self._writer.manifest.term, entry.step),
            durable_at=time.monotonic(),
            bytes_written=self.state.bytes_written + entry.new_bytes,
            write_bytes_per_second=entry.new_bytes / seconds,
        )
        self.recovered()  # whatever becomes of what is removed now
        self._landed = True
        self._writer.apply_retention()
        if self.disk_forecast is not None:
            self.disk_forecast.after(entry)

    def before_it_is_told(self, error: Exception) -> None:
        self.on_failure()


def _reached(run: Path, base: Base) -> int:
    """How far the log behind the newest base goes; what a shadow logs is worth nothing behind a gap."""
    return LogReader(run, read_lineage(run), base.point, base.census).end.step


def _monotonic(written: float) -> float:
    """A wall time of another process on our own clock."""
    age = age_seconds(written, time.time())
    return -math.inf if age is None else time.monotonic() - age


def _state_of_store(run: Path, continues: Point | None) -> PersistState:
    """What the run's store already holds when a shadow starts; trouble shows at the first claim."""
    try:
        newest = next(
            c
            for c in read_lineage(run).candidates
            if continues is None or c.entry.step <= continues.step  # later ones were rewound over
        )
    except (OSError, EverystepError, StopIteration):
        return PersistState()
    return PersistState(durable=newest.point, durable_at=_monotonic(newest.entry.time))
