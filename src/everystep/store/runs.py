"""A run's directory: opening it, claiming a term, and the lineage of bases that count."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from everystep.core.numbers import TERM_MAX
from everystep.core.retention import Rules
from everystep.errors import CorruptData, Fenced, NotARun, StoreError, UnknownVersion
from everystep.format.base import BaseEntry, Manifest, PassedOver, Point, RunDocument
from everystep.format.checks import check_manifest
from everystep.format.document import pack_document, unpack_document
from everystep.store import layout
from everystep.store.disk.commit import write_document
from everystep.store.disk.files import (
    TEMPORARY_PREFIX,
    RunPath,
    claim_folder,
    is_folder,
    make_folder,
    names_in,
    read_file,
    readable,
    remove_file,
    remove_folder,
    sync_folder,
)
from everystep.store.disk.once import put_once

_DEFAULT_RULES = Rules()
_CLAIMS_MAX = 1000  # each was lost to somebody who claimed at the same moment


class Candidate(NamedTuple):
    """A committed base that belongs to the run's lineage."""

    term: int
    entry: BaseEntry
    weights_only: bool = False  # its optimizer slots are gone

    @property
    def point(self) -> Point:
        return Point(self.term, self.entry.step)


class Known(NamedTuple):
    """How far a writer had seen the run that it will write to. A term that others have claimed since then
    fences it, however late it claims its own: a shadow may have stood still for hours.

    A term without a manifest belongs to nobody yet. Whoever serves an attach claims a later one, and the
    other sees that as soon as it is done; who serves none (`attaches` is empty) leaves it alone."""

    term: int
    attaches: tuple[str, ...] = ()  # our own, and those whose state was handed on to us
    step: int = 0  # where the writer begins
    # ours too, of lines that training has gone back from: they fence nobody, and are not gone on from
    left: tuple[str, ...] = ()

    def check(self, run: Path, terms: list[int]) -> None:
        others = [n for n in terms if n > self.term and not self._is_ours(run, n)]
        if others:
            raise Fenced(
                f"claim {run} behind term {self.term}: somebody else has claimed term {others[0]}",
                hint="another trainer or command goes on with this run: stop this one",
            )

    def _is_ours(self, run: Path, term: int) -> bool:
        try:
            manifest = read_manifest(run, term)
        except StoreError:
            return False
        ours = (*self.attaches, *self.left)
        return bool(self.attaches) if manifest is None else manifest.attach in ours

    def place(self, run: Path, point: Point | None) -> Point | None:
        """Where a line that came from `point` has got to in the store. A shadow of it may have claimed an
        term since it was asked for its state, or told nobody: what it wrote there goes on counting."""
        for number in reversed(layout.term_numbers(run)):
            if number <= (point.term if point else 0):
                continue
            manifest = read_manifest(run, number)
            if manifest and manifest.attach in self.attaches and self._leads(manifest, point):
                point = Point(number, self.step)
        return point

    def _leads(self, manifest: Manifest, point: Point | None) -> bool:
        """Whether that term lies on the way from `point` to where the writer begins."""
        begins = manifest.continues
        if begins is None or point is None:
            return begins is None and (point is None or not point.term)
        return begins.term == point.term and begins.step <= self.step


class Lineage(NamedTuple):
    """Bases that count, newest first, and what was wrong on the way."""

    run_id: str
    candidates: list[Candidate]
    problems: list[str]
    path: tuple[tuple[int, int | None], ...] = ()  # terms, oldest first, and the last step of each
    manifests: tuple[Manifest, ...] = ()  # what all this was read from, oldest first


def read_run(run: Path) -> RunDocument | None:
    """The run's own document; None if there is no run yet; NotARun if it is somebody else's folder."""
    path = RunPath(run) / layout.RUN_DOCUMENT
    # looked at first: a document that a shadow writes just now must not pass for somebody else's file
    names = names_in(RunPath(run))
    with contextlib.suppress(FileNotFoundError), readable(path):
        return unpack_document("run", read_file(path), RunDocument, str(path))
    ours = ("terms", layout.TAGS, TEMPORARY_PREFIX)
    if any(not name.startswith(ours) for name in names):
        raise NotARun(
            f"open run {run}: the directory holds other files and no {layout.RUN_DOCUMENT}",
            hint="give a new or empty directory as run=",
        )
    return None


def create_run(run: Path, given: RunDocument | None = None) -> RunDocument:
    """Make the directory a run if it is not one yet; of two racing creators one wins."""
    document = read_run(run)
    if document is None:
        run.mkdir(parents=True, exist_ok=True)
        for parent in run.parents:  # the names of those just made must be durable too
            with contextlib.suppress(PermissionError):
                sync_folder(RunPath(parent))
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        put_once(
            RunPath(run) / layout.RUN_DOCUMENT,
            pack_document("run", given or RunDocument(uuid.uuid4().hex, created)),
        )
        document = read_run(run)
        assert document is not None
    return document


def claim_term(
    run: Path,
    continues: Point | None,
    rules: Rules = _DEFAULT_RULES,
    *,
    known: Known | None = None,
    behind: int = 0,
    over: tuple[PassedOver, ...] = (),
) -> Manifest:
    """Take the next term number for ourselves by an atomic mkdir, and say what we continue. Without `known`
    whatever is newest is gone on from. `behind`: the number is a later one than this. `over`: what was
    decided against, of another tier or by going back."""
    run_id = identify(run)[0] or create_run(run).run_id
    make_folder(layout.terms_dir(run), below=RunPath(run))
    number = _make_term(run, known, behind)
    try:
        continues = known.place(run, continues) if known else continues
    except (OSError, StoreError):
        _give_back(run, number)
        raise
    ancestors = _ancestors(run, continues)
    before = _readable(run)
    dropped, slimmed = _removed(before, {p.term for p in (continues, *ancestors) if p})
    host, pid = socket.gethostname(), os.getpid()
    manifest = Manifest(
        run_id,
        number,
        continues,
        host,
        pid,
        (),
        ancestors,
        dropped,
        slimmed,
        rules,
        token=uuid.uuid4().hex,
        opened=time.time(),
        attach=known.attaches[0] if known and known.attaches else "",
        over=_all_over(before, over),
    )
    try:
        write_manifest(run, manifest)
        sync_folder(layout.terms_dir(run))
        if known is not None:
            check_fence(run, number)  # nothing was written yet: who attaches looks again
    except (OSError, StoreError):
        _give_back(run, number)
        raise
    return manifest


def _give_back(run: Path, number: int) -> None:
    """A term that could not be opened, or was opened too late: nothing was written in it."""
    with contextlib.suppress(OSError, StoreError):
        for name in names_in(layout.term_dir(run, number)):
            if name == layout.MANIFEST or name.startswith(TEMPORARY_PREFIX):
                remove_file(layout.term_dir(run, number) / name)
        remove_folder(layout.term_dir(run, number))


def _make_term(run: Path, known: Known | None, behind: int) -> int:
    """The number behind all that we have looked at: if somebody took it meanwhile, we look again."""
    for _ in range(_CLAIMS_MAX):
        terms = layout.term_numbers(run)
        if known is not None:
            known.check(run, terms)
        number = max((behind, *terms)) + 1
        folder = layout.term_dir(run, number)
        if layout.term_number(folder.name) != number:  # nobody would find it again
            raise StoreError(
                f"claim term {number} of {run}: no run has so many, {TERM_MAX} is the last",
                hint=f"remove what nobody has trained in: {layout.term_dir(run, number - 1)}",
            )
        with contextlib.suppress(FileExistsError):
            claim_folder(folder)
            return number
    raise StoreError(
        f"claim term {number} of {run}: it is taken, and does not show among those that are",
        hint=f"look at {folder}: it should be a folder like those beside it",
    )


def _ancestors(run: Path, point: Point | None) -> tuple[Point, ...]:
    try:
        before = read_manifest(run, point.term) if point else None
    except StoreError:
        return ()
    return (before.continues, *before.ancestors) if before and before.continues else ()


def _readable(run: Path) -> list[Manifest]:
    """Manifests of all terms, whether they count or not."""
    found: list[Manifest] = []
    for number in layout.term_numbers(run):
        with contextlib.suppress(StoreError):
            manifest = read_manifest(run, number)
            found += [manifest] if manifest else []
    return found


def _all_over(before: list[Manifest], over: tuple[PassedOver, ...]) -> tuple[PassedOver, ...]:
    """What was decided against at any time: every writer repeats it, so that all tiers hear of it."""
    lines = {line for manifest in before for line in manifest.over} | set(over)
    return tuple(sorted(lines, key=lambda line: (line.token, line.behind, line.step)))


def _removed(
    before: list[Manifest], terms: set[int]
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """What is gone from these terms, whoever removed it: also one whose own bases count no longer."""
    dropped = {point for manifest in before for point in manifest.dropped}
    slimmed = {point for manifest in before for point in manifest.slimmed}

    def counting(points: set[Point]) -> tuple[Point, ...]:
        found = [point for point in points if point.term in terms]
        return tuple(sorted(found, key=lambda point: (point.term, point.step)))

    return counting(dropped), counting(slimmed)


def write_manifest(run: Path, manifest: Manifest) -> None:
    path = layout.manifest_path(run, manifest.term)
    write_document(path, pack_document("manifest", manifest))


def read_manifest(run: Path, term: int) -> Manifest | None:
    """None if the term was claimed but never opened, or was given back just now."""
    path = layout.manifest_path(run, term)
    try:
        data = read_file(path)
    except FileNotFoundError:
        return None
    manifest = unpack_document("manifest", data, Manifest, str(path))
    if manifest.term != term:
        raise CorruptData(f"read {path}: it is the manifest of term {manifest.term}")
    check_manifest(manifest, str(path))
    return manifest


def newest_manifest(run: Path) -> Manifest | None:
    """Of the term that owns the run: the newest that was opened and can be read."""
    for number in layout.term_numbers(run):
        with contextlib.suppress(CorruptData):
            manifest = read_manifest(run, number)
            if manifest is not None:
                return manifest
    return None


def check_fence(run: Path, term: int) -> None:
    """Raise if a newer term owns the run: the lineage ignores what we write from then on. Raise also if the
    term's folder is gone: the run was moved or deleted, and writing would leave half a run in its place."""
    if not is_folder(layout.term_dir(run, term)):
        raise StoreError(
            f"write to {run}: the folder of term {term} is gone",
            hint="the run was moved, deleted or unmounted: bring it back, or stop this training",
        )
    newest = max(layout.term_numbers(run), default=0)
    if newest > term:
        raise Fenced(
            f"commit to {run} in term {term}: term {newest} owns the run now",
            hint="this trainer was replaced; stop it",
        )


def identify(run: Path) -> tuple[str | None, str | None]:
    """The run's id, and what is wrong with its document; every manifest repeats the id."""
    try:
        document = read_run(run)
        return (document.run_id if document else None), None
    except CorruptData as error:
        for number in layout.term_numbers(run):
            try:
                manifest = read_manifest(run, number)
            except StoreError:
                continue
            if manifest is not None:
                return manifest.run_id, str(error)
        raise CorruptData(
            f"{error}, and no term tells which run {run} is",
            hint="nothing of it can be trusted: put the file back from a copy, or begin in another directory",
        ) from error


def read_lineage(run: Path, *, to_look: bool = False) -> Lineage:
    """Follow the run from its newest term back through the points each one continues. What the system cannot
    read is a problem of its term for whoever only looks; who goes on from the run, or removes what does not
    count, must not take it for lost."""
    run_id, problem = identify(run)
    if run_id is None:
        raise NotARun(f"open run {run}: there is no run", hint="check the path")
    candidates: list[Candidate] = []
    manifests: list[Manifest] = []
    problems = [problem] if problem else []
    dropped: set[Point] = set()
    slimmed: set[Point] = set()
    limits: dict[int, int] | None = None  # newest step that counts, by term; None: no manifest yet
    path: tuple[tuple[int, int | None], ...] = ()
    for number in layout.term_numbers(run):
        if limits is not None and number not in limits:
            continue
        try:
            with readable(layout.manifest_path(run, number)):
                manifest = read_manifest(run, number)
        except UnknownVersion:
            raise
        except StoreError as error:
            if not to_look and not isinstance(error, CorruptData):
                raise
            problems.append(str(error))
            continue
        if manifest is None:
            continue
        if manifest.run_id != run_id:
            problems.append(f"term {number} of {run}: belongs to run {manifest.run_id}")
            continue
        manifests.insert(0, manifest)
        dropped |= set(manifest.dropped)
        slimmed |= set(manifest.slimmed)
        for entry in reversed(manifest.bases):
            point = Point(number, entry.step)
            if (limits is None or entry.step <= limits[number]) and point not in dropped:
                candidates.append(Candidate(number, entry, point in slimmed))
        if limits is None:
            points = [manifest.continues, *manifest.ancestors] if manifest.continues else []
            limits = {point.term: point.step for point in points}
            path = (*((p.term, p.step) for p in reversed(points)), (number, None))
    return Lineage(run_id, candidates, problems, path, tuple(manifests))
