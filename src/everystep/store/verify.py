"""Reads every committed byte of a run and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from everystep.core.census import Census
from everystep.errors import StoreError
from everystep.format.base import Point, StoredFile
from everystep.store.bases import open_checked, read_index
from everystep.store.log import LogReader
from everystep.store.runs import Candidate, Lineage, read_lineage
from everystep.store.tags import read_tags

_THREADS = 4  # hashing releases the GIL; a few readers keep a disk busy


class Report(NamedTuple):
    problems: list[str]
    bases: int
    valid: list[int]
    files: int
    bytes: int
    log_step: int | None  # how far the log goes on behind the newest valid base
    notes: list[str]  # where the log ends, if not at a whole record: a crash leaves that behind


def verify_run(
    run: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Report:
    """Check documents, indexes and all chunks; `progress` is told bytes done and bytes in all."""
    lineage = read_lineage(run)
    problems = list(lineage.problems)
    indexes: list[tuple[Candidate, tuple[StoredFile, ...]]] = []
    censuses: dict[Point, Census] = {}
    elsewhere = _pinned_elsewhere(run, lineage, problems)
    for candidate in (*lineage.candidates, *elsewhere):
        try:
            index = read_index(run, candidate)
            indexes.append((candidate, index.files))
            censuses[candidate.point] = index.census
        except StoreError as error:
            problems.append(str(error))
    files = {file.path: file for _, listed in indexes for file in listed}
    total, done = sum(file.bytes for file in files.values()), 0
    bad: set[str] = set()
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, problem in pool.map(lambda f: (f, _problem(run, f)), files.values()):
            if problem:
                problems.append(problem)
                bad.add(file.path)
            done += file.bytes
            progress(done, total)
    good = [c for c, listed in indexes if not bad & {file.path for file in listed}]
    valid = [c.entry.step for c in good if c not in elsewhere]
    newest = next((c for c in lineage.candidates if c.entry.step in valid), None)
    behind = LogReader(run, lineage, newest.point, censuses[newest.point]) if newest else None
    logged = behind.end.step if behind and behind.records else None
    notes = behind.problems if behind else []
    return Report(problems, len(lineage.candidates), valid, len(files), total, logged, notes)


def _pinned_elsewhere(run: Path, lineage: Lineage, problems: list[str]) -> list[Candidate]:
    """Bases that the run was rewound over, and that tags keep all the same."""
    try:
        pinned = read_tags(run).values()
    except StoreError as error:
        problems.append(str(error))
        return []
    known = {candidate.point for candidate in lineage.candidates}
    return list({c.point: c for c in pinned if c.point not in known}.values())


def _problem(run: Path, file: StoredFile) -> str | None:
    try:
        open_checked(run, file)
    except StoreError as error:
        return str(error).partition("\nhint:")[0]
    return None
