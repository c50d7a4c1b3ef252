"""Reads every committed byte of a run and says what is wrong with it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from everystep.core.census import Census
from everystep.errors import NotARun, StoreError
from everystep.format.base import Point, StoredFile
from everystep.store import layout
from everystep.store.bases import check_file, read_index
from everystep.store.bucket import Bucket
from everystep.store.bucket_commits import read_newest
from everystep.store.fetch import Fetcher, check_object, fetch_documents
from everystep.store.log_reader import read_log
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
    notes: list[str]  # what of the log is damaged, missing, or not finished, as a crash leaves it


Progress = Callable[[int, int], None]  # told bytes done and bytes in all


def _silent(done: int, total: int) -> None:
    pass


def verify_bucket(url: str, progress: Progress = _silent) -> Report:
    """The same for what a bucket holds: every byte is read from there, none is kept."""
    bucket = Bucket(url)
    commit = read_newest(bucket)
    if commit is None:
        raise NotARun(f"open {url}: there is no run", hint="check the URL")
    with tempfile.TemporaryDirectory(prefix="everystep-") as folder:
        lineage = fetch_documents(bucket, commit, Path(folder))
        Fetcher(bucket, Path(folder), Path(folder)).log(lineage)
        return verify_run(Path(folder), progress, lambda file: check_object(bucket, file))


def verify_run(
    run: Path,
    progress: Progress = _silent,
    check: Callable[[StoredFile], object] | None = None,
) -> Report:
    """Check documents, indexes and all chunks."""
    check = check or (lambda file: check_file(run, file))
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
    files = {layout.name_of(file): file for _, listed in indexes for file in listed}
    total, done = sum(file.bytes for file in files.values()), 0
    bad: set[str] = set()
    with ThreadPoolExecutor(_THREADS) as pool:
        for file, problem in pool.map(lambda f: (f, _problem(check, f)), files.values()):
            if problem:
                problems.append(problem)
                bad.add(layout.name_of(file))
            done += file.bytes
            progress(done, total)
    good = [c for c, listed in indexes if not bad & set(map(layout.name_of, listed))]
    valid = [c.entry.step for c in good if c not in elsewhere]
    starts = [(c.point, censuses[c.point]) for c in reversed(lineage.candidates) if c in good]
    logged, notes = _read_log(run, lineage, starts)
    return Report(problems, len(lineage.candidates), valid, len(files), total, logged, notes)


def _read_log(
    run: Path, lineage: Lineage, starts: list[tuple[Point, Census]]
) -> tuple[int | None, list[str]]:
    """From every base to the next one, and behind the newest to its end, as far as that goes."""
    logged: int | None = None
    notes: list[str] = []
    for (base, census), following in zip_longest(starts, starts[1:]):
        until = following[0].step if following else None
        behind = read_log(run, lineage, base, census, until)
        logged = behind.end.step if len(behind) and until is None else None
        notes += behind.problems
    return logged, list(dict.fromkeys(notes))


def _pinned_elsewhere(run: Path, lineage: Lineage, problems: list[str]) -> list[Candidate]:
    """Bases that the run was rewound over, and that tags keep all the same."""
    try:
        pinned = read_tags(run).values()
    except StoreError as error:
        problems.append(str(error))
        return []
    known = {candidate.point for candidate in lineage.candidates}
    return list({c.point: c for c in pinned if c.point not in known}.values())


def _problem(check: Callable[[StoredFile], object], file: StoredFile) -> str | None:
    try:
        check(file)
    except StoreError as error:
        return str(error).partition("\nhint:")[0]
    return None
