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
from everystep.store.files import RunPath, look_at, size_of
from everystep.store.mapped import map_file

_PART_BYTES_MAX = 16 << 20
_OFFSET_DIGITS = 15


class LogEnd(NamedTuple):
    """How far an epoch's log is synced: what lies behind it may still change."""

    segment: RunPath
    bytes: int
    step: int


class SegmentPlace(NamedTuple):
    """Which segment of a log: what its name is made from."""

    epoch: int
    number: int
    after: int

    def path(self, run: Path) -> RunPath:
        return layout.log_dir(run, self.epoch) / layout.segment_name(self.number, self.after)


def part_path(segment: RunPath, at: int) -> str:
    return f"{segment.inside}/{at:0{_OFFSET_DIGITS}d}"


def parts_by_segment(listing: Mapping[str, int]) -> dict[SegmentPlace, list[tuple[int, int]]]:
    """Of every segment the parts that can be read one behind the other: where each begins and its size."""
    found: dict[SegmentPlace, list[tuple[int, int]]] = {}
    for path, size in sorted(listing.items()):
        segment, _, offset = path.rpartition("/")
        at, place = layout.number_of(offset), _place_of(segment)
        if place is not None and at is not None:
            parts = found.setdefault(place, [])
            if at == sum(parts[-1] if parts else (0, 0)) and size <= _PART_BYTES_MAX:
                parts.append((at, size))
    return found


def _place_of(segment: str) -> SegmentPlace | None:
    """None: no name of ours."""
    epoch, name = layout.epoch_of(segment), segment.rpartition("/")[2]
    if epoch is None or not layout.is_segment(name):
        return None
    path = layout.log_dir(Path(), epoch) / name
    place = SegmentPlace(epoch, layout.segment_number(path), layout.segment_after(path))
    return place if path.inside == segment else None


def is_log_part(path: str) -> bool:
    return _place_of(path.rpartition("/")[0]) is not None


class LogShipper:
    """Of one epoch and those before it. Owned by one thread."""

    def __init__(self, bucket: Bucket, run: Path, epoch: int, sent: Callable[[int], None]) -> None:
        self._bucket, self._run, self._epoch, self._sent = bucket, run, epoch, sent
        self._shipped: dict[RunPath, int] | None = None  # bytes of each segment that the bucket has
        self._earlier_shipped = False  # of epochs before ours, whose log no longer grows
        self.step: int | None = None  # the newest record of our epoch that is there
        self.behind_bytes = 0

    def turn(self, end: LogEnd | None) -> None:
        """Ship what has been synced since; `end` is that of our own epoch."""
        if self._shipped is None:
            parts = parts_by_segment(self._bucket.listing("epochs"))
            self._shipped = {place.path(self._run): sum(p[-1]) for place, p in parts.items() if p}
        todo = self._synced(end)
        have = self._shipped
        self.behind_bytes = sum(max(0, size - have.get(path, 0)) for path, size in todo.items())
        for path, size in todo.items():
            self._extend(path, size, have)
        self._earlier_shipped = True
        if end is not None:
            self.step = end.step

    def _synced(self, end: LogEnd | None) -> dict[RunPath, int]:
        """Segments here, oldest first, and how many bytes of each will not change any more."""
        found: dict[RunPath, int] = {}
        earlier = () if self._earlier_shipped else layout.epoch_numbers(self._run)
        for epoch in sorted({self._epoch, *(n for n in earlier if n < self._epoch)}):
            for path in layout.segments(self._run, epoch):
                if epoch < self._epoch or (end is not None and path < end.segment):
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
        while at < size:
            part = data[at : min(at + _PART_BYTES_MAX, size)]
            self._sent(len(part))
            self._bucket.put(part_path(path, at), part)
            at = shipped[path] = at + len(part)
            self.behind_bytes = max(0, self.behind_bytes - len(part))
