"""Names of the objects that a log becomes in a bucket. Objects cannot grow: a segment becomes parts, each
named by where it begins:

terms/000002/log/000000/000001-000000000120.log/000000000004096-000000000125

The second number is the step that its last record leads to, if the segment ended there when it was sent: so
a listing tells how far the log goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from everystep.store import layout
from everystep.store.disk.files import RunPath

PART_BYTES_MAX = 16 << 20
_OFFSET_DIGITS, _STEP_DIGITS = 15, 12


class SegmentPlace(NamedTuple):
    """Which segment of a log: what its name is made from."""

    term: int
    rank: int
    number: int
    after: int

    def path(self, run: Path) -> RunPath:
        return layout.log_dir(run, self.term, self.rank) / layout.segment_name(
            self.number, self.after
        )


class LogPart(NamedTuple):
    """An object, by what its name says and its size."""

    at: int
    step: int  # -1: not told
    size: int

    def path(self, segment: RunPath) -> str:
        told = f"-{self.step:0{_STEP_DIGITS}d}" if self.step >= 0 else ""
        return f"{segment.inside}/{self.at:0{_OFFSET_DIGITS}d}{told}"

    @property
    def end(self) -> int:
        return self.at + self.size


def parts_by_segment(listing: Mapping[str, int]) -> dict[SegmentPlace, list[LogPart]]:
    """Of every segment the parts that can be read one behind the other."""
    found: dict[SegmentPlace, list[LogPart]] = {}
    # of two that begin at one place, an answer was lost: the longer one came later
    for path, size in sorted(
        listing.items(), key=lambda item: (item[0].partition("-")[0], -item[1])
    ):
        place, part = _place_of(path.rpartition("/")[0]), _part_of(path, size)
        if place is not None and part is not None:
            found.setdefault(place, []).append(part)
    return {place: _chain(parts) for place, parts in found.items()}


def _chain(parts: list[LogPart]) -> list[LogPart]:
    chain: list[LogPart] = []
    for part in sorted(parts, key=lambda part: (part.at, -part.size)):
        if part.at == (chain[-1].end if chain else 0) and 0 < part.size <= PART_BYTES_MAX:
            chain.append(part)
    return chain


def log_ends(listing: Mapping[str, int]) -> dict[int, int]:
    """By term, how far its log goes."""
    found: dict[int, int] = {}
    for place, parts in parts_by_segment(listing).items():
        ends = [part.step for part in parts if part.step >= 0]
        if ends:
            found[place.term] = max(found.get(place.term, -1), *ends)
    return found


def _part_of(path: str, size: int) -> LogPart | None:
    """None: no name of ours."""
    at, dash, step = path.rpartition("/")[2].partition("-")
    numbers = layout.number_of(at), layout.number_of(step) if dash else -1
    if numbers[0] is None or numbers[1] is None:
        return None
    return LogPart(numbers[0], numbers[1], size)


def _place_of(segment: str) -> SegmentPlace | None:
    """None: no name of ours."""
    folder, _, name = segment.rpartition("/")
    term, rank = layout.term_of(segment), layout.rank_number(folder.rpartition("/")[2])
    if term is None or rank is None or not layout.is_segment(name):
        return None
    if rank:  # nobody reads the log of another rank yet: none may count
        return None
    path = layout.log_dir(Path(), term, rank) / name
    place = SegmentPlace(term, rank, layout.segment_number(path), layout.segment_after(path))
    return place if path.inside == segment else None


def is_log_part(path: str) -> bool:
    return _place_of(path.rpartition("/")[0]) is not None
