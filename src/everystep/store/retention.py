"""What retention removes from a store: decided in `core/retention.py`, carried out here, file by file.

The manifest forgets first (`TermWriter.apply_retention`); then goes whatever nothing refers to any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from everystep.core.retention import BaseFacts, Rules, Verdict, judge, log_begins_at
from everystep.errors import CorruptData, StoreError
from everystep.format.base import Point
from everystep.store import layout
from everystep.store.bases import BaseReader, check_file, read_base
from everystep.store.disk.commit import crash_point
from everystep.store.disk.files import RunPath, bytes_of, remove_file, remove_folder
from everystep.store.log_reader import read_log
from everystep.store.runs import Candidate, Lineage
from everystep.store.tags import read_tags, tags_by_point


class Plan(NamedTuple):
    """A verdict for each base of the lineage, newest first."""

    bases: list[tuple[Candidate, Verdict]]
    log_begins_at: int

    @property
    def keep(self) -> list[Candidate]:
        """As they are from now on: some of them without their slots."""
        slim = {candidate.point for candidate in self.slim}
        return [
            c._replace(weights_only=c.weights_only or c.point in slim)
            for c, verdict in self.bases
            if verdict.stays
        ]

    @property
    def drop(self) -> list[Candidate]:
        return [candidate for candidate, verdict in self.bases if not verdict.stays]

    @property
    def slim(self) -> list[Candidate]:
        """Those that lose their slots now."""
        return [c for c, v in self.bases if v.stays and not v.with_slots and not c.weights_only]


def plan_retention(run: Path, lineage: Lineage, rules: Rules, verified: int | None = 0) -> Plan:
    """Ask the rules; `verified` is the place of the newest base whose bytes are right."""
    candidates = lineage.candidates
    names = tags_by_point(read_tags(run))
    facts = [
        BaseFacts(c.entry.step, c.entry.time, c.entry.metric, names.get(c.point, ()))
        for c in candidates
    ]
    verdicts = [
        verdict
        if verdict.with_slots or _can_lose_slots(run, candidate)
        else Verdict(verdict.reasons)
        for candidate, verdict in zip(candidates, judge(facts, rules, verified), strict=True)
    ]
    begin = log_begins_at(facts, rules, verified) if facts else 0
    return Plan(list(zip(candidates, verdicts, strict=True)), begin)


def older_unpinned(run: Path, candidates: list[Candidate]) -> list[Candidate]:
    """Bases before the newest that no tag pins, newest first: those that may go if a quota demands it."""
    pinned = {candidate.point for candidate in read_tags(run).values()}
    return [c for c in candidates[1:] if c.point not in pinned]


def plan_without(run: Path, lineage: Lineage, rules: Rules, victim: Candidate) -> Plan:
    """All other bases stay as they are, with the log behind those that no tag pins."""
    stay = [c for c in lineage.candidates if c.point != victim.point]
    bases = [(c, Verdict(("store_quota",) if c in stay else ())) for c in lineage.candidates]
    needed = min(c.entry.step for c in (stay[0], *older_unpinned(run, stay)))
    return Plan(bases, max(needed, plan_retention(run, lineage, rules).log_begins_at))


def _can_lose_slots(run: Path, candidate: Candidate) -> bool:
    """The last steps of a base with a log tail are still to be replayed, which takes an optimizer."""
    try:
        return all(part.tail is None for part in read_base(run, candidate).parts)
    except CorruptData:
        return False


def newest_verified(run: Path, lineage: Lineage) -> int | None:
    """The place of the newest base whose every byte is right; reads it whole."""
    for place, candidate in enumerate(lineage.candidates):
        with contextlib.suppress(StoreError):
            BaseReader(run, read_base(run, candidate))
            return place
    return None


def frontier(run: Path, lineage: Lineage, verified: int) -> Point:
    """The newest point of a run: where who writes next goes on, without taking anything back."""
    base = lineage.candidates[verified]
    logged = read_log(run, lineage, base.point, read_base(run, base).census).end
    newest = lineage.candidates[0].point
    return newest if newest.step > logged.step else logged


def read_back(run: Path, candidate: Candidate, tick: Callable[[], None] = lambda: None) -> None:
    """Check what writing this base has put on the disk; what it refers to was checked when that was new."""
    for file in read_base(run, candidate).files:
        if (file.term, file.step) == (candidate.term, candidate.entry.step):
            check_file(run, file, tick)


def unreferenced(run: Path, keep: list[Candidate], newest_term: int) -> list[RunPath]:
    """Files of bases that neither a kept base nor a tag refers to, leftovers of killed writers included. What
    lies in newer terms than this belongs to their writers."""
    pinned = list(read_tags(run).values())
    needed: set[RunPath] = set()
    for candidate in (*keep, *pinned):
        try:
            base = read_base(run, candidate)
            needed |= {layout.file_path(run, file) for file in base.files}
            needed.update(layout.documents(run, base))
        except CorruptData as error:
            if _may_come_back(error):
                raise
            # it refers to nothing any more, but what is left of it may be looked at
            folder = layout.base_dir(run, candidate.term, candidate.entry.step)
            needed.update(layout.own_files(folder))
    return [
        path
        for term, folder in layout.base_dirs(run)
        if term <= newest_term
        for path in layout.own_files(folder)
        if path not in needed
    ]


def _may_come_back(error: CorruptData) -> bool:
    """The disk did not give the bytes this time: nobody knows what they refer to."""
    why = error.__cause__
    return isinstance(why, OSError) and not isinstance(why, FileNotFoundError)


def remove(paths: list[RunPath], still_ours: Callable[[], None]) -> int:
    """Remove files, and folders that are empty then; returns how many bytes that freed. `still_ours` raises
    once the run belongs to somebody else. What cannot be removed is told when all the rest is gone."""
    freed, refused = 0, None
    for path in paths:
        still_ours()
        try:
            size = bytes_of(path)
            remove_file(path)
            freed += size
        except OSError as error:
            refused = refused or error
        crash_point("old_bases_half_removed")
    _remove_folders(paths)
    if refused is not None:
        raise refused
    return freed


def remove_base(run: Path, term: int, step: int) -> None:
    """What a write that failed has left; nothing is said of what cannot be removed."""
    folder = layout.base_dir(run, term, step)
    with contextlib.suppress(OSError, StoreError):
        for path in layout.own_files(folder):
            remove_file(path)
        for part in layout.part_dirs(folder):  # also where not one file was written
            remove_folder(part)
        remove_folder(folder / layout.PARTS)
    remove_folder(folder)


def _remove_folders(paths: list[RunPath]) -> None:
    """Of bases whose files these were, if they are empty now."""
    folders = {folder for path in paths for folder in layout.folders_of(path)}
    for folder in sorted(folders, key=lambda folder: -len(folder.names)):
        remove_folder(folder)
