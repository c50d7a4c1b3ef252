"""The durable log: whole records, in batches, to the store. A thread of its own writes and syncs them.

A record is copied when it is whole, because its slots are freed when it has been replayed. Where the disk is
slower than the records, they are dropped here: the log ends, and goes on behind the next base.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from everystep.core.census import Census
from everystep.core.events import Event, Rebase, Seal
from everystep.core.sizes import size
from everystep.errors import NotEnoughDisk
from everystep.format.base import Point
from everystep.format.log import LoggedRecord, census_digest
from everystep.lane.host import read_facts
from everystep.shadow.logcodec import LogCodec
from everystep.shadow.spans import Spans
from everystep.shadow.worker import Worker
from everystep.store.bucket.ship_log import LogEnd
from everystep.store.disk.files import RunPath
from everystep.store.disk.meter import Meter
from everystep.store.log import LogWriter

log = logging.getLogger(__name__)

_WAITING_BYTES_MAX = 4 << 30
_MEMORY_SHARE = 8  # of what is available when the log begins, one part at most
_NOWHERE_BYTES_MAX = 256 << 20  # as long as there is no place to write to
_PATIENCE_SECONDS = 1.0  # a batch that does not fill is written after this long


class LogKeeper(Worker):
    """Owned by the main thread; `_write` runs in the writer's, one batch at a time."""

    def __init__(self, run: Path, census: Census, batch: int, meter: Meter | None = None) -> None:
        super().__init__("log")
        self._run, self._census, self.batch = run, census, batch
        self._meter = meter or Meter()
        self.codec = LogCodec(census)
        self._waiting: list[LoggedRecord] = []
        self._bytes = 0
        self._bytes_max = min(
            _WAITING_BYTES_MAX, read_facts().memory_available_bytes // _MEMORY_SHARE
        )
        self._batch: list[LoggedRecord] = []  # that is being written
        self.nowhere = ""  # why there is no place to write to, if there is none
        self._since = 0.0
        self._writer: LogWriter | None = None
        self._grows = False  # the newest segment
        self._wants_room = False
        self._roll = False
        self._based_at: Point | None = None
        self.step: int | None = None  # the newest record that is on the disk
        self.end: LogEnd | None = None  # where that record ends: up to there the log can be shipped
        self.written_at = 0.0  # by the monotonic clock
        self.bytes_written = 0
        self.writes, self.write_seconds = 0, 0.0
        self.spans = Spans()
        self._patience = _PATIENCE_SECONDS
        self._lags = ""  # why records were dropped here, until a batch is written
        self.dropped = 0
        self._gap_until: int | None = None  # the last step of a gap that no base has healed
        self._ends_at = 0  # the step before it
        self._begins_after: int | None = None  # the step that the first record kept here follows
        self._offered: int | None = None  # the newest step that came
        self._was_base = False  # the record that came last brought most of the state again
        self._lock = threading.Lock()  # of the gap: both threads may find one

    @property
    def problem(self) -> str:
        failed = self.trouble.problem
        return f"log: {failed}" if failed else self._lags

    def offer(self, seal: Seal, entries: Sequence[tuple[list[Event], memoryview]]) -> None:
        """A record is whole: keep it until it is written."""
        if self.trouble.fenced:
            return
        if not self.batch:  # switched off: what comes is missing until a base lies behind it
            # the trainer may have dropped steps, too
            came = seal.after if self._offered is None else self._offered
            self._lose(self._waiting[0].after if self._waiting else came, seal.step, 0)
            self._offered = seal.step
            return
        if self._offered is not None and seal.after != self._offered:  # the trainer dropped steps
            self._lose(self._offered, seal.after, 0)
        # the state that recording begins with is written as a base, and only once
        begins = self._offered is None
        was_base, self._was_base = self._was_base, _is_base(entries, self._census, begins=begins)
        if self._was_base and not was_base:
            self._lose(0 if begins else seal.after, seal.step, 0)
            self._offered = seal.step
            return
        body = self.codec.framed(entries)
        self._begins_after = seal.after if begins else self._begins_after
        self._offered = seal.step
        if self._held_bytes + len(body) > self._room and self._waiting:
            self._lose(self._waiting[0].after, seal.step, len(self._waiting) + 1)
            self._lags = f"{self.nowhere or self._slow}: the log goes on behind the next base"
            log.warning("log_dropped step=%d records=%d", seal.step, len(self._waiting) + 1)
            self._waiting, self._bytes = [], 0
            return
        self._since = self._since if self._waiting else time.monotonic()
        self._waiting.append(LoggedRecord(seal.step, seal.after, body))
        self._bytes += len(body)

    @property
    def _held_bytes(self) -> int:
        return self._bytes + _bytes_of(self._batch)

    @property
    def _room(self) -> int:
        return min(self._bytes_max, _NOWHERE_BYTES_MAX if self.nowhere else self._bytes_max)

    @property
    def _slow(self) -> str:
        rate = self._meter.limits.disk_bytes_per_second
        if not rate:
            return "the disk is slower than the records"
        return f"disk_bytes_per_second ({size(rate)}) is less than the records take, or the disk is slower"

    def write_in_batches(self, batch: int, patience_seconds: float) -> None:
        """From now on so many records at a time, and fewer only after this long; 0: none."""
        self.batch = batch
        self._patience = max(_PATIENCE_SECONDS, patience_seconds)

    def _lose(self, before: int, last: int, records: int) -> None:
        """The log has a gap: it is of no use from there on, until a base lies behind it."""
        with self._lock:
            known = self._gap_until
            self._ends_at = before if known is None else min(before, self._ends_at)
            self._gap_until = last if known is None else max(last, known)
            self.dropped += records

    def reaches(self, base: int) -> int:
        """The step that this base and the log behind it bring back."""
        gap, end = self._gap_until, self.step or 0
        return max(base, end if gap is None or gap <= base else min(end, self._ends_at))

    @property
    def broken(self) -> bool:
        return self._gap_until is not None and self.batch > 0

    def look_after(
        self,
        run_id: str,
        term: int,
        durable: Point | None,
        *,
        reached: int,
        fits: bool,
        now: bool,
        base_bytes: Callable[[], int] = lambda: 0,
        clears_up: bool = False,
    ) -> None:
        """Begin to write a batch if one is full, old, or wanted now. `reached`: what the store brought back
        when our term was claimed. `fits`: its newest base is of the model that these records speak of.
        `base_bytes`: what the next base will take. `clears_up`: what a new base leaves unneeded is removed
        just now."""
        if term and self._begins_after is not None:
            first, self._begins_after = self._begins_after, None
            if first > reached:  # the shadow before had not written its last records yet
                self._lose(reached, first, 0)
        if not fits and self._offered is not None:
            last = self._offered if self._gap_until is None else self._gap_until
            self._lose(durable.step if durable else 0, last, 0)
        if durable != self._based_at:  # what lies before a base can be dropped as a whole
            self._based_at, self._roll = durable, True
            if durable is not None and self._gap_until is not None:
                self._close_gap(durable.step)
        if not self.may_begin or not self._waiting or not term:
            return
        if clears_up and self._wants_room:
            return
        old = time.monotonic() - self._since > self._patience
        if len(self._waiting) >= self.batch or old or now:
            self._meter.expect_base(base_bytes())
            self._batch, self._waiting, self._bytes = self._waiting, [], 0
            self.spans.begin()
            self.begin(lambda: self._write(run_id, term), then=self._end_batch)

    def _close_gap(self, base: int) -> None:
        """A base lies behind the gap, or in it: records before it continue nothing, and may be too many for
        the room there is."""
        with self._lock:
            assert self._gap_until is not None
            self._gap_until = self._gap_until if base < self._gap_until else None
        self._waiting = [record for record in self._waiting if record.step > base]
        self._bytes = _bytes_of(self._waiting)
        if not self.busy:  # else the thread may be telling how it ended, fenced perhaps
            self.trouble = self.trouble.retry_now()

    def _end_batch(self) -> None:
        """However it ended: its bytes are needed no more."""
        self._batch = []
        self.spans.end()

    def before_it_is_told(self, error: Exception) -> None:
        """The batch is lost, and what comes is behind a gap."""
        batch = self._batch
        self._lose(batch[0].after, batch[-1].step, len(batch))
        self._grows = False
        self._wants_room = isinstance(error, NotEnoughDisk)

    def _write(self, run_id: str, term: int) -> None:
        batch = self._batch
        if self._writer is None:
            census = census_digest(self._census)
            self._writer = LogWriter(self._run, run_id, term, census, self._meter)
        if self._roll:
            self._roll = False
            self._close()
        try:
            self._meter.check_log(self._run, _bytes_of(batch))
        except NotEnoughDisk:
            self._close()  # a gap follows: behind it another segment begins
            raise
        began = time.monotonic()
        self._grows = True
        self.bytes_written += self._writer.append(batch)
        self.write_seconds += time.monotonic() - began
        self.writes += 1
        self.step, self.written_at = batch[-1].step, time.monotonic()
        self.end = LogEnd(*self._writer.end, self.step)
        self._lags, self._wants_room = "", False

    def _close(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._grows = False

    def ended(self) -> tuple[RunPath, int] | None:
        """The newest segment and the step it ends with, if nothing more comes into it. No segment that
        follows tells so as long as there is no room to begin one."""
        end = self.end
        return None if self._grows or end is None else (end.segment, end.step)


def _bytes_of(records: Sequence[LoggedRecord]) -> int:
    return sum(len(record.body) for record in records)


def _is_base(
    entries: Sequence[tuple[list[Event], memoryview]], census: Census, *, begins: bool
) -> bool:
    """Whether a record brings most of the state again, or, where recording `begins`, the last part of it: the
    others came with records that nobody could replay."""
    events = [event for events, _ in entries for event in events]
    based = {atom for e in events if isinstance(e, Rebase) for atom in e.atoms}
    if begins:
        return bool(based)
    total = sum(atom.bytes for atom in census.atoms)
    return 2 * sum(census.atoms[atom].bytes for atom in based) > total
