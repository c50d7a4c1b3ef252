"""The log behind a base, read back. Heads first: where it ends is known before its bodies are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path

from everystep.core.census import Census
from everystep.errors import CorruptData, StoreError, UnknownVersion
from everystep.format.base import Point
from everystep.format.entry import check_body
from everystep.format.log import (
    LoggedRecord,
    RecordHead,
    begin_record,
    census_digest,
    read_heads,
    unchecked,
    unpack_segment_header,
)
from everystep.store import layout
from everystep.store.disk.files import RunPath
from everystep.store.disk.mapped import expect_hops, map_file, read_ahead
from everystep.store.interrupt import stop_if_asked
from everystep.store.runs import Lineage

_FAR_BYTES = 1 << 20  # reading so much takes longer than going to what lies behind it
_FOREVER = 1 << 62


def read_log(
    run: Path, lineage: Lineage, base: Point, census: Census, until: int | None = None
) -> LogReader:
    """What the log holds behind a base, every byte checked."""
    reader = LogReader(run, lineage, base, census, until)
    reader.check()
    return reader


class LogReader:
    """The records behind a base, in their order. Each is checked before it is given out; where they end, only
    their heads tell until `check` has read all of them."""

    def __init__(
        self, run: Path, lineage: Lineage, base: Point, census: Census, until: int | None = None
    ) -> None:
        self._census, self._digest = census, census_digest(census)
        self._base = base
        self._segments: list[_Segment] = []
        self.problems: list[str] = []
        if until is not None and until <= base.step:
            return  # nothing of it is wanted, and a disk would be busy with it
        terms = [term for term, _ in lineage.path]
        begin = terms.index(base.term) if base.term in terms else len(terms)
        for term, limit in lineage.path[begin:]:
            last = min(n for n in (limit, until, _FOREVER) if n is not None)
            if not self._follow(run, lineage.run_id, term, last):
                break

    @property
    def end(self) -> Point:
        """What these records lead to."""
        if not self._segments:
            return self._base
        return Point(self._segments[-1].term, self._segments[-1].heads[-1].step)

    def __len__(self) -> int:
        return sum(len(segment.heads) for segment in self._segments)

    @property
    def steps(self) -> list[int]:
        return [head.step for segment in self._segments for head in segment.heads]

    def __iter__(self) -> Iterator[LoggedRecord]:
        """CorruptData in place of one that is damaged."""
        for segment in self._segments:
            yield from segment.records()

    def check(self) -> None:
        """Read all of them now. The log ends before one that is damaged, and says so."""
        try:
            for segment in self._segments:
                segment.check(self._census)
        except CorruptData as error:
            self.problems.append(str(error))
        self._segments = [s for s in self._segments if s.checked and s.heads]

    def check_end(self) -> None:
        """Read the last segment now: what was not synced when the power went lies there."""
        while self._segments and not self._segments[-1].checked:
            segment = self._segments[-1]
            try:
                segment.check(self._census)
            except CorruptData as error:
                self.problems.append(str(error))
            if not segment.heads:
                self._segments.pop()

    def prefetch(self) -> None:
        """Its first bodies come from the disk while the caller does something else."""
        for segment in self._segments[:1]:
            segment.prefetch()

    def unchecked_records(self) -> Iterator[LoggedRecord]:
        """To be looked at where they begin, checked or not: no more of them is read."""
        for segment in self._segments:
            expect_hops(segment.data, segment.heads[0].size >= _FAR_BYTES)
            for head in segment.heads:
                yield unchecked(segment.data, head)
            expect_hops(segment.data, False)

    def _follow(self, run: Path, run_id: str, term: int, last: int) -> bool:
        """Take what belongs to the chain from one term; False: it ends here."""
        paths = layout.segments(run, term)
        for path, behind in zip_longest(paths, paths[1:]):
            if behind is not None and layout.segment_after(behind) <= self.end.step:
                continue  # none of its records is newer than what the next segment follows
            if layout.segment_after(path) >= last:
                break  # all of its records are newer than what is wanted
            # what a segment holds beyond the beginning of the next is of a batch that failed
            end = last if behind is None else min(last, layout.segment_after(behind))
            try:
                if not self._take(path, run_id, term, end):
                    return False
            except UnknownVersion:
                raise  # whoever passed it over would lose steps that are there
            except StoreError as error:  # what comes behind it follows, or does not
                self.problems.append(str(error))
        return True

    def _take(self, path: RunPath, run_id: str, term: int, last: int) -> bool:
        """The same from one segment."""
        data = map_file(path)
        expect_hops(data, True)
        header = unpack_segment_header(data, str(path))
        if (header.run_id, header.term, header.rank) != (run_id, term, 0):
            raise CorruptData(f"read {path}: it belongs to another run, term or rank")
        if header.census != self._digest:
            self.problems.append(f"log {path}: the model or its optimizers had changed")
            return False
        segment = _Segment(path, term, data)
        for head in self._wanted(data, path, last):
            if head.after != self.end.step:
                what = f"step {head.after} is missing, it ends at {self.end.step}"
                self.problems.append(f"log {path}: {what}")
                return False
            if not segment.heads:
                self._segments.append(segment)
            segment.heads.append(head)
        return True

    def _wanted(self, data: memoryview, path: RunPath, last: int) -> list[RecordHead]:
        """Bodies that the base holds already are not read: they may be damaged. Large ones
        are not read here at all, one behind the other: `read_ahead` brings in several at once."""
        found, hops = [], True
        try:
            for head in read_heads(data, str(path)):
                if hops != (head.size >= _FAR_BYTES):
                    expect_hops(data, hops := not hops)
                if head.step > last:
                    break
                if head.step > self.end.step or head.after >= self.end.step:
                    found.append(head)
        except CorruptData as error:  # a torn end
            self.problems.append(str(error))
        expect_hops(data, False)
        return found


class _Segment:
    """What is wanted of a segment: the heads of its records, and its bytes, mapped."""

    def __init__(self, path: RunPath, term: int, data: memoryview) -> None:
        self.path, self.term, self.data = path, term, data
        self.heads: list[RecordHead] = []
        self.checked = False  # what is left of it
        self._comes = False

    def prefetch(self) -> None:
        if not self._comes:
            self._comes = True
            read_ahead(self.data, self.heads[0].start, self.heads[-1].start + self.heads[-1].size)

    def check(self, census: Census) -> None:
        """Read its bodies. It ends before one that is damaged: then CorruptData."""
        whole = 0
        try:
            for record in self.records():
                check_body(record, census, str(self.path))
                whole += 1
        finally:
            self.heads, self.checked = self.heads[:whole], True

    def records(self) -> Iterator[LoggedRecord]:
        """Each when it has been checked; the next one is being checked then."""
        if self.checked:
            yield from (unchecked(self.data, head) for head in self.heads)
            return
        self.prefetch()
        begun = map(partial(begin_record, self.data, str(self.path)), self.heads)
        record = next(begun, None)
        while record is not None:
            stop_if_asked()
            behind = next(begun, None)
            yield record()
            record = behind
