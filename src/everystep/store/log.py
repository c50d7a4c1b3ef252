"""The log of a term: append-only segments of records, written in batches, each synced before it counts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from everystep.errors import StoreError
from everystep.format.log import (
    HEAD_BYTES,
    Chain,
    LoggedRecord,
    SegmentHeader,
    begin_checksum,
    pack_segment_header,
)
from everystep.store import layout
from everystep.store.disk.commit import Turn, at_once, crash_point
from everystep.store.disk.files import RunPath, look_at, make_folder, remove_file, sync_folder
from everystep.store.disk.stream import BLOCK_BYTES, StreamWriter
from everystep.store.runs import Lineage, check_fence

_SEGMENT_BYTES = 1 << 30  # a new one is begun behind it


class LogWriter:
    """Appends to the newest segment of one term and rank. Owned by one thread."""

    def __init__(
        self,
        run: Path,
        run_id: str,
        term: int,
        census: int,
        turn: Turn = at_once,
        rank: int = 0,
    ) -> None:
        self._run, self._run_id, self._term, self._census = run, run_id, term, census
        self._turn, self._rank = turn, rank
        self._path: RunPath | None = None
        self._stream: StreamWriter | None = None
        self._chain: Chain | None = None
        self._whole = 0  # bytes of the segment that count

    def append(self, records: Sequence[LoggedRecord]) -> int:
        """One sync for all of them; returns how many bytes it took. When it raises, nothing of them counts,
        and the next batch begins a new segment."""
        check_fence(self._run, self._term)
        size = sum(HEAD_BYTES + len(record.body) for record in records)
        self._turn(-(-size // BLOCK_BYTES) * BLOCK_BYTES)
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
            self._check_linked(stream)
            done = True
        finally:
            if not done:
                self._give_up()
        self._whole = stream.bytes
        return stream.bytes - before

    @property
    def end(self) -> tuple[RunPath, int]:
        """The segment that was written last, and how far it is synced."""
        assert self._path is not None and self._stream is not None
        return self._path, self._stream.bytes

    def _begin(self, after: int) -> StreamWriter:
        self.close()
        self._turn(BLOCK_BYTES)
        header = SegmentHeader(self._run_id, self._term, self._rank, after, self._census)
        folder = layout.log_dir(self._run, self._term, self._rank)
        make_folder(folder, below=RunPath(self._run))
        before = layout.segments(self._run, self._term, self._rank)
        number = layout.segment_number(before[-1]) + 1 if before else 1
        self._path = folder / layout.segment_name(number, after)
        stream = self._stream = StreamWriter(self._path)
        stream.append(memoryview(pack_segment_header(header)))
        stream.drain()
        stream.sync()
        sync_folder(folder)
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

    def _check_linked(self, stream: StreamWriter) -> None:
        """A file that somebody has removed takes all that is written to it, and gives none of it back;
        another one may have its name now. Some file systems count no links, and show it all the same."""
        assert self._path is not None
        if stream.links:
            return
        there = look_at(self._path)
        if there is None or not os.path.samestat(there, stream.stat):
            how = "removed" if there is None else "replaced"
            raise StoreError(
                f"append to {self._path}: somebody has {how} this file while it was written",
                hint="only everystep prune may remove files of a run; the log goes on behind the next base",
            )

    def _give_up(self) -> None:
        """The segment ends here; if nothing in it ever counted, it goes. The page cache may show a batch that
        will never be on the disk: nobody shall go on from that."""
        path, stream, whole = self._path, self._stream, self._whole
        if stream is not None:
            with suppress(OSError):
                stream.invalidate(whole)
        with suppress(OSError):
            self.close()
        if path is not None and not whole:
            with suppress(OSError):
                remove_file(path)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._path, self._chain, self._whole = None, None, None, 0


def old_segments(run: Path, lineage: Lineage, oldest_step: int) -> list[RunPath]:
    """Segments that no kept base needs, and those of terms that nobody continues. What lies in newer terms
    than those of the lineage belongs to their writers."""
    alive = dict(lineage.path)
    found = []
    for term in layout.term_numbers(run):
        if term > max(alive, default=0):
            continue
        gone_on_from = alive.get(term)  # no later record of it counts
        paths = layout.segments(run, term)
        for path, behind in zip_longest(paths, paths[1:]):
            # no record of a segment is newer than what the next one follows
            replaced = None if behind is None else layout.segment_after(behind)
            ends = min((n for n in (gone_on_from, replaced) if n is not None), default=None)
            if term not in alive or (ends is not None and ends <= oldest_step):
                found.append(path)
    return found
