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
from everystep.format.base import Base, Point, StoredFile
from everystep.store import layout
from everystep.store.bases import check_file, check_small_files, read_base
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.commits import read_newest
from everystep.store.bucket.fetch import Fetcher, check_object, fetch_documents, read_object
from everystep.store.bucket.objects import Objects
from everystep.store.disk.mapped import map_file
from everystep.store.log_reader import read_log
from everystep.store.runs import Candidate, Lineage, read_lineage
from everystep.store.tags import read_tags

_LOOKS_MAX = 5  # at a run whose writer goes on meanwhile
_TOO_FAST = (
    "bases are written and removed faster than they are read here: none was read whole; verify it again "
    "while its writer rests, or keep more bases with keep=Keep(last=…)"
)
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
        raise NotARun(f"open {bucket.url}: there is no run", hint="check the URL")
    with tempfile.TemporaryDirectory(prefix="everystep-") as folder:
        lineage = fetch_documents(bucket, commit, Path(folder))
        objects = Objects.of_commit(bucket, commit)
        Fetcher(objects, Path(folder), Path(folder)).log(lineage)
        return verify_run(
            Path(folder),
            progress,
            lambda file: check_object(objects, file),
            lambda file: read_object(objects, file),
        )


def verify_run(
    run: Path,
    progress: Progress = _silent,
    check: Callable[[StoredFile], object] | None = None,
    read: Callable[[StoredFile], bytes | memoryview] | None = None,
) -> Report:
    """Check documents, all chunks, and what loading would hold against itself. Beside a writer: what
    it has dropped meanwhile is no damage."""
    checker = _Checker(
        run,
        check or (lambda file: check_file(run, file)),
        read or (lambda file: map_file(layout.file_path(run, file))),
        progress,
    )
    lineage = read_lineage(run, to_look=True)
    for _ in range(_LOOKS_MAX):
        checker.look(lineage)
        now = read_lineage(run, to_look=True)
        report = checker.report(lineage, now)
        if not (report.problems or report.notes) or now == lineage:
            break
        lineage = now
    return report


class _Problem(NamedTuple):
    text: str
    bases: frozenset[Point] = frozenset()  # whose damage it is; empty: not of any base


class _Checker:
    """Remembers what was looked at: a second look reads only what was wrong, or is new."""

    def __init__(
        self,
        run: Path,
        check: Callable[[StoredFile], object],
        read: Callable[[StoredFile], bytes | memoryview],
        progress: Progress,
    ) -> None:
        self._run, self._check, self._read, self._progress = run, check, read, progress
        self._good: set[str] = set()
        self._problems: list[_Problem] = []
        self._valid: list[tuple[Candidate, Census]] = []
        self._files: dict[str, StoredFile] = {}
        self._elsewhere: list[Candidate] = []

    def look(self, lineage: Lineage) -> None:
        self._problems = [_Problem(text) for text in lineage.problems]
        self._elsewhere = _pinned_elsewhere(self._run, lineage, self._problems)
        bases: list[tuple[Candidate, Base]] = []
        for candidate in (*lineage.candidates, *self._elsewhere):
            try:
                bases.append((candidate, read_base(self._run, candidate)))
            except StoreError as error:
                self._problems.append(_Problem(_first(error), frozenset([candidate.point])))
        self._files = {layout.name_of(file): file for _, base in bases for file in base.files}
        bad = self._look_at_files(bases)
        self._valid = [
            (candidate, base.census)
            for candidate, base in bases
            if not bad & set(map(layout.name_of, base.files))
            and self._small_files_are_right(candidate, base)
        ]

    def report(self, lineage: Lineage, now: Lineage) -> Report:
        """What was found in `lineage`. What a base was found to lack that does not count any more was dropped
        with it."""
        there = {candidate.point for candidate in (*now.candidates, *self._elsewhere)}
        problems = [p.text for p in self._problems if not p.bases or p.bases & there]
        valid = [(c, census) for c, census in self._valid if c not in self._elsewhere]
        starts = [(candidate.point, census) for candidate, census in reversed(valid)]
        logged, notes = _read_log(self._run, lineage, starts)
        if lineage.candidates and not (valid or problems):
            notes = [_TOO_FAST, *notes]
        return Report(
            problems,
            len(lineage.candidates),
            [candidate.entry.step for candidate, _ in valid],
            len(self._files),
            sum(file.bytes for file in self._files.values()),
            logged,
            notes,
        )

    def _look_at_files(self, bases: list[tuple[Candidate, Base]]) -> set[str]:
        """Names of files that are not what they should be."""
        left = {name: file for name, file in self._files.items() if name not in self._good}
        total, done = sum(file.bytes for file in left.values()), 0
        bad: set[str] = set()
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, problem in pool.map(lambda n: (n, _problem(self._check, left[n])), left):
                if problem:
                    needed = (c.point for c, base in bases if left[name] in base.files)
                    self._problems.append(_Problem(problem, frozenset(needed)))
                    bad.add(name)
                else:
                    self._good.add(name)
                done += left[name].bytes
                self._progress(done, total)
        return bad

    def _small_files_are_right(self, candidate: Candidate, base: Base) -> bool:
        """What its small files say, as who loads it would read them."""
        try:
            check_small_files(base, self._read)
        except StoreError as error:
            self._problems.append(_Problem(_first(error), frozenset([candidate.point])))
            return False
        return True


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


def _pinned_elsewhere(run: Path, lineage: Lineage, problems: list[_Problem]) -> list[Candidate]:
    """Bases that the run was rewound over, and that tags keep all the same."""
    try:
        pinned = read_tags(run).values()
    except StoreError as error:
        problems.append(_Problem(_first(error)))
        return []
    known = {candidate.point for candidate in lineage.candidates}
    return list({c.point: c for c in pinned if c.point not in known}.values())


def _problem(check: Callable[[StoredFile], object], file: StoredFile) -> str | None:
    try:
        check(file)
    except StoreError as error:
        return _first(error)
    return None


def _first(error: StoreError) -> str:
    """Without what to do about it."""
    return str(error).partition("\nhint:")[0]
