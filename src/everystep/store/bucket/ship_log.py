"""Puts the log into a bucket, part by part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from everystep.errors import CorruptData
from everystep.format.log import read_heads
from everystep.store import layout
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.commits import Fence
from everystep.store.bucket.log_parts import PART_BYTES_MAX, LogPart, parts_by_segment
from everystep.store.bucket.objects import Objects
from everystep.store.disk.files import RunPath, look_at, size_of
from everystep.store.disk.mapped import map_file


class LogEnd(NamedTuple):
    """How far a term's log is synced: what lies behind it may still change."""

    segment: RunPath
    bytes: int
    step: int


class LogShipper:
    """Of one term and those before it. Owned by one thread."""

    def __init__(self, bucket: Bucket, run: Path, term: int, sent: Callable[[int], None]) -> None:
        self._bucket, self._run, self._term, self._sent = bucket, run, term, sent
        self._objects = Objects.of_directory(bucket, run)
        self._fence: Fence | None = None
        self._shipped: dict[RunPath, int] | None = None  # bytes of each segment that the bucket has
        self._earlier_shipped = False  # of terms before ours, whose log no longer grows
        self.step: int | None = None  # the newest record of our term that is there
        self.behind_bytes = 0

    def turn(self, end: LogEnd | None) -> None:
        """Ship what has been synced since; `end` is that of our own term. What is there counts only if the
        bucket is still ours afterwards: who takes it over looks at what is there by then."""
        self._fence = self._fence or Fence(self._bucket, self._run, self._term)
        if self._shipped is None:
            parts = parts_by_segment(self._objects.listing())
            self._shipped = {place.path(self._run): p[-1].end for place, p in parts.items() if p}
        todo = self._synced(end)
        have = self._shipped
        self.behind_bytes = sum(max(0, size - have.get(path, 0)) for path, size in todo.items())
        for path, size in todo.items():
            self._extend(path, size, have)
        if any(have[path] for path in todo):
            self._fence.check()
        self._earlier_shipped = True
        if end is not None:
            self.step = end.step

    def _synced(self, end: LogEnd | None) -> dict[RunPath, int]:
        """Segments here, oldest first, and how many bytes of each will not change any more."""
        found: dict[RunPath, int] = {}
        earlier = () if self._earlier_shipped else layout.term_numbers(self._run)
        for term in sorted({self._term, *(n for n in earlier if n < self._term)}):
            for path in layout.segments(self._run, term):
                if term < self._term or (end is not None and path < end.segment):
                    size = size_of(path)  # 0 if retention has just removed it
                elif end is not None and path == end.segment:
                    size = end.bytes
                else:
                    continue
                found[path] = size
        return found

    def _extend(self, path: RunPath, size: int, shipped: dict[RunPath, int]) -> None:
        at = shipped.get(path, 0)
        try:
            data = map_file(path) if at < size else memoryview(b"")
        except CorruptData:
            if look_at(path) is not None:
                raise
            return  # retention has just removed it
        step = _last_step(data[:size], path) if at < size else -1
        while at < size:
            data_part = data[at : min(at + PART_BYTES_MAX, size)]
            part = LogPart(at, step if at + len(data_part) == size else -1, len(data_part))
            self._sent(part.size)
            self._objects.put(part.path(path), data_part)
            at = shipped[path] = part.end
            self.behind_bytes = max(0, self.behind_bytes - part.size)


def _last_step(data: memoryview, segment: RunPath) -> int:
    """That the records lead to, as far as they are whole; -1: there is none."""
    step = -1
    with contextlib.suppress(CorruptData):
        for head in read_heads(data, str(segment)):
            step = head.step
    return step
