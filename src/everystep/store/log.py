"""The log of an epoch: append-only segments of records, written in batches, each synced before it counts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from everystep.core.census import Census
from everystep.errors import CorruptData, StoreError, UnknownVersion
from everystep.format.base import Point
from everystep.format.log import (
    HEAD_BYTES,
    Chain,
    LoggedRecord,
    RecordHead,
    SegmentHeader,
    begin_checksum,
    census_digest,
    pack_segment_header,
    read_heads,
    read_record,
    unpack_segment_header,
)
from everystep.store import layout
from everystep.store.commit import crash_point, make_dirs, sync_dir
from everystep.store.mapped import expect_hops, map_file, read_ahead
from everystep.store.runs import Lineage, check_fence
from everystep.store.stream import StreamWriter

_SEGMENT_BYTES = 1 << 30  # a new one is begun behind it
_FAR_BYTES = 1 << 20  # reading so much takes longer than going to what lies behind it


class LogWriter:
    """Appends to the newest segment of one epoch. Owned by one thread."""

    def __init__(self, run: Path, run_id: str, epoch: int, census: int) -> None:
        self._run, self._run_id, self._epoch, self._census = run, run_id, epoch, census
        self._path: Path | None = None
        self._stream: StreamWriter | None = None
        self._chain: Chain | None = None
        self._counts = False  # whether anything in the segment does

    def append(self, records: Sequence[LoggedRecord]) -> int:
        """One sync for all of them; returns how many bytes it took. When it raises, nothing of them counts,
        and the next batch begins a new segment."""
        check_fence(self._run, self._epoch)
        done = False
        try:
            stream = self._stream
            if stream is None or stream.bytes >= _SEGMENT_BYTES:
                stream = self._begin(records[0].after)
            before = stream.bytes
            self._fill(stream, records)
            crash_point("log_filled")
            stream.drain()
            crash_point("log_written")
            stream.sync()
            crash_point("log_synced")
            done = True
        finally:
            if not done:
                self._give_up()
        self._counts = True
        return stream.bytes - before

    @property
    def end(self) -> tuple[Path, int]:
        """The segment that was written last, and how far it is synced."""
        assert self._path is not None and self._stream is not None
        return self._path, self._stream.bytes

    def _begin(self, after: int) -> StreamWriter:
        self.close()
        header = SegmentHeader(self._run_id, self._epoch, after, self._census)
        folder = layout.log_dir(self._run, self._epoch)
        make_dirs(folder, below=self._run)
        before = layout.segments(self._run, self._epoch)
        number = layout.segment_number(before[-1]) + 1 if before else 1
        self._path = folder / layout.segment_name(number, after)
        stream = self._stream = StreamWriter(self._path)
        stream.append(memoryview(pack_segment_header(header)))
        stream.drain()
        stream.sync()
        sync_dir(folder)
        self._chain = Chain(header)
        return stream

    def _fill(self, stream: StreamWriter, records: Sequence[LoggedRecord]) -> None:
        """A head tells the checksum of its body: of a large one it is made while that is written."""
        assert self._chain is not None
        for step, after, body in records:
            checksum = begin_checksum(body)
            put_head = stream.leave_hole(HEAD_BYTES)
            if put_head is None:
                head = self._chain.head(step, after, len(body), checksum())
                stream.append(memoryview(head))
            stream.append(body)
            if put_head is not None:
                put_head(self._chain.head(step, after, len(body), checksum()))

    def _give_up(self) -> None:
        """The segment ends here; if nothing in it ever counted, it goes."""
        path, counts = self._path, self._counts
        with suppress(OSError):
            self.close()
        if path is not None and not counts:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._path, self._chain, self._counts = None, None, None, False


class LogReader:
    """What the log holds behind a base, in its order; every record has been checked."""

    def __init__(
        self, run: Path, lineage: Lineage, base: Point, census: Census, until: int | None = None
    ) -> None:
        self._census = census_digest(census)
        self.records: list[LoggedRecord] = []
        self.end = base
        self.problems: list[str] = []
        if until is not None and until <= base.step:
            return  # nothing of it is wanted, and a disk would be busy with it
        epochs = [epoch for epoch, _ in lineage.path]
        begin = epochs.index(base.epoch) if base.epoch in epochs else len(epochs)
        for epoch, limit in lineage.path[begin:]:
            last = min(n for n in (limit, until, _FOREVER) if n is not None)
            if not self._follow(run, lineage.run_id, epoch, last):
                break

    def _follow(self, run: Path, run_id: str, epoch: int, last: int) -> bool:
        """Take what belongs to the chain from one epoch; False: it ends here."""
        paths = layout.segments(run, epoch)
        for path, behind in zip_longest(paths, paths[1:]):
            if behind is not None and layout.segment_after(behind) <= self.end.step:
                continue  # none of its records is newer than what the next segment follows
            if layout.segment_after(path) >= last:
                break  # all of its records are newer than what is wanted
            try:
                if not self._take(path, run_id, epoch, last):
                    return False
            except UnknownVersion:
                raise  # whoever passed it over would lose steps that are there
            except StoreError as error:  # what comes behind it follows, or does not
                self.problems.append(str(error))
        return True

    def _take(self, path: Path, run_id: str, epoch: int, last: int) -> bool:
        """The same from one segment."""
        data = map_file(path)
        expect_hops(data, True)
        header = unpack_segment_header(data, str(path))
        if (header.run_id, header.epoch) != (run_id, epoch):
            raise CorruptData(f"read {path}: it belongs to another run or epoch")
        if header.census != self._census:
            self.problems.append(f"log {path}: the model or its optimizers had changed")
            return False
        wanted = self._wanted(data, path, last)
        if wanted:
            read_ahead(data, wanted[0].start, wanted[-1].start + wanted[-1].size)
        for head in wanted:
            if head.after != self.end.step:
                what = f"step {head.after} is missing, it ends at {self.end.step}"
                self.problems.append(f"log {path}: {what}")
                return False
            self.records.append(read_record(data, str(path), head))
            self.end = Point(epoch, head.step)
        return True

    def _wanted(self, data: memoryview, path: Path, last: int) -> list[RecordHead]:
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


_FOREVER = 1 << 62


def drop_old_segments(run: Path, lineage: Lineage, oldest_step: int) -> None:
    for path in old_segments(run, lineage, oldest_step):
        path.unlink(missing_ok=True)


def old_segments(run: Path, lineage: Lineage, oldest_step: int) -> list[Path]:
    """Segments that no kept base needs, and those of epochs that nobody continues."""
    alive = dict(lineage.path)
    found = []
    for epoch in layout.epoch_numbers(run):
        paths = layout.segments(run, epoch)
        for path, behind in zip_longest(paths, paths[1:]):
            # no record of a segment is newer than what the next one follows
            replaced = behind is not None and layout.segment_after(behind) <= oldest_step
            if replaced or epoch not in alive:
                found.append(path)
    return found
