"""Puts the log into a bucket. Objects cannot grow: a segment becomes parts, each named by where it begins:

epochs/000002/log/000001-000000000120.log/000000000004096
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from everystep.errors import CorruptData
from everystep.store import layout
from everystep.store.bucket import Bucket
from everystep.store.mapped import map_file

_PART_BYTES_MAX = 16 << 20
_OFFSET_DIGITS = 15


class LogEnd(NamedTuple):
    """How far an epoch's log is synced: what lies behind it may still change."""

    segment: Path
    bytes: int
    step: int


def is_log_part(path: str) -> bool:
    return layout.epoch_of(path) is not None and path.split("/")[2] == "log"


def part_path(segment: str, at: int) -> str:
    return f"{segment}/{at:0{_OFFSET_DIGITS}d}"


def parts_by_segment(listing: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Of every segment the parts that can be read one behind the other: where each begins and its size."""
    found: dict[str, list[tuple[int, int]]] = {}
    for path, size in sorted(listing.items()):
        segment, _, offset = path.rpartition("/")
        if is_log_part(path) and offset.isdigit():
            parts = found.setdefault(segment, [])
            if int(offset) == sum(parts[-1] if parts else (0, 0)):
                parts.append((int(offset), size))
    return found


class LogShipper:
    """Of one epoch and those before it. Owned by one thread."""

    def __init__(self, bucket: Bucket, run: Path, epoch: int, sent: Callable[[int], None]) -> None:
        self._bucket, self._run, self._epoch, self._sent = bucket, run, epoch, sent
        self._shipped: dict[str, int] | None = None  # bytes of each segment that the bucket has
        self._earlier_shipped = False  # of epochs before ours, whose log no longer grows
        self.step: int | None = None  # the newest record of our epoch that is there
        self.behind_bytes = 0

    def turn(self, end: LogEnd | None) -> None:
        """Ship what has been synced since; `end` is that of our own epoch."""
        if self._shipped is None:
            parts = parts_by_segment(self._bucket.listing("epochs"))
            self._shipped = {segment: sum(p[-1]) for segment, p in parts.items() if p}
        todo = self._synced(end)
        have = self._shipped
        self.behind_bytes = sum(max(0, size - have.get(name, 0)) for name, size in todo.items())
        for name, size in todo.items():
            self._extend(name, size, have)
        self._earlier_shipped = True
        if end is not None:
            self.step = end.step

    def _synced(self, end: LogEnd | None) -> dict[str, int]:
        """Segments here, oldest first, and how many bytes of each will not change any more."""
        found: dict[str, int] = {}
        earlier = () if self._earlier_shipped else layout.epoch_numbers(self._run)
        for epoch in sorted({self._epoch, *(n for n in earlier if n < self._epoch)}):
            for path in layout.segments(self._run, epoch):
                if epoch < self._epoch or (end is not None and path < end.segment):
                    size = _size(path)
                elif end is not None and path == end.segment:
                    size = end.bytes
                else:
                    continue
                found[str(path.relative_to(self._run))] = size
        return found

    def _extend(self, name: str, size: int, shipped: dict[str, int]) -> None:
        at = shipped.get(name, 0)
        try:
            data = map_file(self._run / name) if at < size else memoryview(b"")
        except CorruptData:
            if (self._run / name).exists():
                raise
            return  # retention has just removed it
        while at < size:
            part = data[at : min(at + _PART_BYTES_MAX, size)]
            self._sent(len(part))
            self._bucket.put(part_path(name, at), part)
            at = shipped[name] = at + len(part)
            self.behind_bytes = max(0, self.behind_bytes - len(part))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # retention has just removed it
        return 0
