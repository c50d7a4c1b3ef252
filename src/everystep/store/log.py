"""The log of an epoch: append-only segments of records, written in batches, each synced before it counts."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from everystep.core.census import Census
from everystep.errors import CorruptData, StoreError
from everystep.format.base import Point
from everystep.format.log import (
    BLOCK_BYTES,
    Chain,
    LoggedRecord,
    SegmentHeader,
    census_digest,
    pack_segment_header,
    read_records,
    unpack_segment_header,
)
from everystep.store import layout
from everystep.store.commit import crash_point, make_dirs, sync_dir
from everystep.store.mapped import map_file
from everystep.store.runs import Lineage, check_fence
from everystep.store.stream import open_direct, write_at

_SEGMENT_BYTES = 1 << 30  # a new one is begun behind it
_BUFFER_BYTES_MIN = 1 << 20


class LogWriter:
    """Appends to the newest segment of one epoch. Owned by one thread."""

    def __init__(self, run: Path, run_id: str, epoch: int, census: int) -> None:
        self._run, self._run_id, self._epoch, self._census = run, run_id, epoch, census
        self._path: Path | None = None
        self._fd, self._direct = -1, False
        self._chain: Chain | None = None
        self._at = 0
        self._buffer = memoryview(b"")

    def append(self, records: Sequence[LoggedRecord]) -> int:
        """One write and one sync for all of them; returns how many bytes it took. When it raises, nothing of
        them counts, and the next batch begins a new segment."""
        check_fence(self._run, self._epoch)
        try:
            if self._fd < 0 or self._at >= _SEGMENT_BYTES:
                self._begin(records[0].after)
            size = self._fill(records)
            crash_point("log_filled")
            self._direct = write_at(self._fd, self._buffer[:size], self._at, direct=self._direct)
            crash_point("log_written")
            os.fdatasync(self._fd)
            crash_point("log_synced")
        except OSError:
            if self._path is not None and self._at <= BLOCK_BYTES:  # nothing in it ever counted
                self._path.unlink(missing_ok=True)
            self.close()
            raise
        self._at += size
        return size

    @property
    def end(self) -> tuple[Path, int]:
        """The segment that was written last, and how far it is synced."""
        assert self._path is not None
        return self._path, self._at

    def _begin(self, after: int) -> None:
        self.close()
        header = SegmentHeader(self._run_id, self._epoch, after, self._census)
        folder = layout.log_dir(self._run, self._epoch)
        make_dirs(folder, below=self._run)
        before = layout.segments(self._run, self._epoch)
        number = layout.segment_number(before[-1]) + 1 if before else 1
        path = self._path = folder / layout.segment_name(number, after)
        self._fd, self._direct = open_direct(path)
        self._room(BLOCK_BYTES)
        self._buffer[:BLOCK_BYTES] = pack_segment_header(header)
        self._direct = write_at(self._fd, self._buffer[:BLOCK_BYTES], 0, direct=self._direct)
        os.fsync(self._fd)
        sync_dir(folder)
        self._chain, self._at = Chain(header), BLOCK_BYTES

    def _fill(self, records: Sequence[LoggedRecord]) -> int:
        assert self._chain is not None
        heads = [self._chain.head(r.step, r.after, r.body) for r in records]
        used = sum(len(head) + len(r.body) for head, r in zip(heads, records, strict=True))
        size = -(-used // BLOCK_BYTES) * BLOCK_BYTES
        self._room(size)
        at = 0
        for head, record in zip(heads, records, strict=True):
            for part in (head, record.body):
                self._buffer[at : at + len(part)] = part
                at += len(part)
        self._buffer[at:size] = bytes(size - at)
        return size

    def _room(self, size: int) -> None:
        if len(self._buffer) < size:  # mapped memory is aligned, as direct writes want it
            self._buffer = memoryview(mmap.mmap(-1, max(size, _BUFFER_BYTES_MIN)))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path, self._chain, self._at = -1, None, None, 0


class LogReader:
    """What the log holds behind a base, in its order; every record has been checked."""

    def __init__(
        self, run: Path, lineage: Lineage, base: Point, census: Census, until: int | None = None
    ) -> None:
        self._census = census_digest(census)
        self.records: list[LoggedRecord] = []
        self.end = base
        self.problems: list[str] = []
        epochs = [epoch for epoch, _ in lineage.path]
        begin = epochs.index(base.epoch) if base.epoch in epochs else len(epochs)
        for epoch, limit in lineage.path[begin:]:
            last = min(n for n in (limit, until, _FOREVER) if n is not None)
            if not self._follow(run, lineage.run_id, epoch, last):
                break

    def _follow(self, run: Path, run_id: str, epoch: int, last: int) -> bool:
        """Take what belongs to the chain from one epoch; False: it ends here."""
        for path in layout.segments(run, epoch):
            try:
                data = map_file(path)
                header = unpack_segment_header(data, str(path))
                if (header.run_id, header.epoch) != (run_id, epoch):
                    raise CorruptData(f"read {path}: it belongs to another run or epoch")
                if header.census != self._census:
                    self.problems.append(f"log {path}: the model or its optimizers had changed")
                    return False
                for record in read_records(data, str(path)):
                    if record.step > last:
                        return True
                    if record.step <= self.end.step and record.after < self.end.step:
                        continue  # the base holds it already
                    if record.after != self.end.step:
                        self.problems.append(
                            f"log {path}: step {record.after} is missing, it ends at {self.end.step}"
                        )
                        return False
                    self.records.append(record)
                    self.end = Point(epoch, record.step)
            except StoreError as error:  # a torn end: what comes behind it follows, or does not
                self.problems.append(str(error))
        return True


_FOREVER = 1 << 62


def drop_old_segments(run: Path, lineage: Lineage, oldest_step: int) -> None:
    """Remove segments that no kept base needs, and those of epochs that nobody continues."""
    alive = dict(lineage.path)
    for epoch in layout.epoch_numbers(run):
        paths = layout.segments(run, epoch)
        for path, behind in zip_longest(paths, paths[1:]):
            # no record of a segment is newer than what the next one follows
            replaced = behind is not None and layout.segment_after(behind) <= oldest_step
            if replaced or epoch not in alive:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
