"""What each of the two tiers knows of the run."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from everystep.core.tiers import Passed, TermMark, Tier
from everystep.errors import StoreError
from everystep.format.base import Manifest, PassedOver, Point
from everystep.format.commit import Commit
from everystep.store import layout
from everystep.store.bases import read_base
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.log_parts import log_ends
from everystep.store.bucket.objects import Objects
from everystep.store.log_reader import LogReader
from everystep.store.runs import read_lineage, read_manifest


def bucket_tier(bucket: Bucket, commit: Commit) -> Tier:
    """The log counts in the newest term, and in those before it as far as they were gone on from."""
    tier, logged = _tier(commit.manifests), log_ends(Objects.of_commit(bucket, commit).listing())
    for term in {commit.term, *tier.continued} & tier.marks.keys():
        end = logged.get(term, -1)
        tier = _as_far_as(tier, term, min(end, tier.continued.get(term, end)))
    return tier


def _as_far_as(tier: Tier, term: int, step: int) -> Tier:
    mark = tier.marks[term]
    return tier._replace(marks={**tier.marks, term: mark._replace(step=max(mark.step, step))})


def _tier(manifests: Sequence[Manifest]) -> Tier:
    steps = {m.term: max((e.step for e in m.bases), default=-1) for m in manifests}
    newest = max(manifests, key=lambda m: m.term, default=None)
    points = [newest.continues, *newest.ancestors] if newest and newest.continues else []
    over: dict[str, set[Passed]] = defaultdict(set)
    for line in (line for manifest in manifests for line in manifest.over):
        over[line.token].add(Passed(line.behind, line.step))
    return Tier(
        {m.term: TermMark(m.token, steps[m.term]) for m in manifests},
        {point.term: point.step for point in points},
        over,
    )


def local_tier(run: Path, commit: Commit | None) -> Tier:
    """Terms of the directory that hold something, or that the bucket knows; how far the newest goes."""
    known = {m.token for m in commit.manifests} if commit else set()
    found = []
    for term in layout.term_numbers(run):
        try:
            manifest = read_manifest(run, term)
        except StoreError:
            continue
        holds = manifest is not None and (
            manifest.bases or layout.segments(run, term) or manifest.over
        )
        if manifest is not None and (holds or manifest.token in known):
            found.append(manifest)
    tier, end = _tier(found), line_end(run)
    there = end is not None and end.term in tier.marks
    return _as_far_as(tier, end.term, end.step) if end is not None and there else tier


def passed_over(run: Path, point: Point, newest: int) -> tuple[PassedOver, ...]:
    """What a run that is taken back to a point decides against: its terms from there on, as far as its line
    goes in each. So what a bucket holds of them is not taken for something that nobody has seen; what others
    write in them behind that is."""
    lineage = read_lineage(run)
    tokens = {m.term: m.token for m in lineage.manifests if m.token}
    newest = max(newest, point.step, *(c.entry.step for c in lineage.candidates))
    found = []
    for term, last in lineage.path:
        behind = point.step if term == point.term else -2
        step = newest if last is None else last
        if term >= point.term and term in tokens and step > behind and newest > point.step:
            found.append(PassedOver(tokens[term], step, behind))
    return tuple(found)


def line_end(run: Path) -> Point | None:
    """How far the directory's lineage goes, the log included, as far as it can be read."""
    with contextlib.suppress(StoreError):
        lineage = read_lineage(run)
        for candidate in lineage.candidates:
            with contextlib.suppress(StoreError):
                census = read_base(run, candidate).census
                return LogReader(run, lineage, candidate.point, census).end
    return None
