"""A writer that was replaced while it clears up: a successor claims the run between every two operations of
retention. Nothing of the successor goes, and nothing that counted when it claimed the run."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ondisk
import pytest
from states import random_states

from everystep.cli.prune import prune_run
from everystep.core.events import Seal
from everystep.core.retention import Rules
from everystep.errors import Fenced, StoreError
from everystep.format.base import Manifest, Point
from everystep.format.entry import frame_entry
from everystep.format.log import LoggedRecord, census_digest
from everystep.format.slot import pack_events
from everystep.recover.find import find_newest
from everystep.store import layout, runs
from everystep.store.log import LogWriter, old_segments
from everystep.store.retention import remove, unreferenced
from everystep.store.runs import Known, read_lineage
from everystep.store.tags import read_tags, set_tag
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run

from .test_retention import CENSUS, snapshot

_FILE_EVENTS = (
    "open",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.listdir",
    "os.scandir",
)
RULES = Rules(2, keep_slots=1)


class Operations:
    """Calls back before every operation on files below a folder, in the thread that asked for it. Python
    tells of them all, so that none can be forgotten here."""

    def __init__(self) -> None:
        self.folder = ""
        self.before: Callable[[str], None] | None = None
        self._thread = 0
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if self.before is None or event not in _FILE_EVENTS:
            return
        if self._is_ours(event, *args) and threading.get_ident() == self._thread:
            before, self.before = self.before, None  # what it does itself is not counted
            before(event)
            self.before = before

    def _is_ours(self, event: str, name: Any, *args: Any) -> bool:
        """Below the run's folder names are relative to a descriptor, or there is the descriptor alone. On the
        way from the run to a file nothing is seen but that folders are there: that is one operation."""
        if isinstance(name, int):
            return True
        if str(name).startswith("/"):
            return str(name).startswith(self.folder)
        return event != "open" or bool(args[1] & os.O_CREAT)

    @contextmanager
    def watched(self, folder: Path, before: Callable[[str], None]) -> Iterator[None]:
        self.folder, self.before, self._thread = str(folder), before, threading.get_ident()
        try:
            yield
        finally:
            self.before = None


OPERATIONS = Operations()


def record(step: int) -> LoggedRecord:
    document = pack_events([Seal(step, step - 1, random_states(), b"", (b"",), 0)])
    return LoggedRecord(step, step - 1, memoryview(frame_entry(*document, b"")))


def log_of(run: Path, writer: TermWriter) -> LogWriter:
    manifest = writer.manifest
    return LogWriter(run, manifest.run_id, manifest.term, census_digest(CENSUS))


def build(run: Path) -> TermWriter:
    """Terms 1 and 2, with logs, a base that a tag pins, leftovers of a killed writer. The writer of term 2
    has bases to drop, one to slim, files nobody refers to and segments to remove."""
    first = TermWriter(run, None, RULES)
    logged = log_of(run, first)
    for step in (2, 3):
        first.commit(snapshot(step))
        logged.close()
        logged.append([record(step + 1)])
    logged.close()
    set_tag(run, "pinned", 2)
    killed = ondisk.part_dir(run, 1, 9)
    killed.mkdir(parents=True)
    (killed / ondisk.WEIGHTS).write_bytes(b"half a base")
    second = TermWriter(run, Point(1, 4), RULES)
    logged = log_of(run, second)
    for step in (5, 6, 7):
        second.commit(snapshot(step, thawed=step))
        logged.close()
        logged.append([record(step + 1)])
    logged.close()
    return second


class Successor:
    """Claims the run, writes a base and a log, and remembers all that counts for it."""

    def __init__(self, run: Path, continues: Point) -> None:
        self.run = run
        self.writer = TermWriter(run, continues, RULES)
        step = continues.step + 1
        before = read_lineage(run).candidates[0]
        thawed = before.entry.step if before.term == 2 else 0
        self.writer.commit(snapshot(step, thawed=thawed))  # refers to files of the base before it
        self._log = log_of(run, self.writer)
        self._log.append([record(step + 1)])
        self.counts = read_lineage(run).candidates
        self.tags = read_tags(run)
        self.newest = step + 1

    def check(self) -> None:
        """All of it is still there, the log goes on in the file that others read, and it is resumed from."""
        self._log.append([record(self.newest + 1)])
        counting = read_lineage(self.run).candidates
        assert set(self.counts) <= set(counting)  # more, if a zombie took back that some are to go
        assert read_tags(self.run) == self.tags
        report = verify_run(self.run)  # every byte, what tags pin included
        assert not report.problems and report.bases == len(counting)
        found, _ = find_newest(self.run, None)
        assert found is not None
        assert found.point == Point(self.writer.manifest.term, self.newest + 1)
        assert not found.problems


def newest_point(run: Path) -> Point:
    found, _ = find_newest(run, None)
    assert found is not None
    return found.point


def oldest_base(run: Path) -> Point:
    """Somebody goes back to what is just about to go."""
    return next(c for c in reversed(read_lineage(run).candidates) if not c.weights_only).point


def apply_retention(run: Path, zombie: TermWriter) -> None:
    with suppress(Fenced):
        zombie.apply_retention()


def prune(run: Path, zombie: TermWriter) -> None:
    with suppress(Fenced):
        prune_run(run, {"keep_last": 1}, dry_run=False, force=True)


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of small files come and go."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("clear_up", "first", "continued"),
    # prune begins with a look at what terms there are: it goes on behind whoever claimed the run before that
    [
        (apply_retention, 0, newest_point),
        (apply_retention, 0, oldest_base),
        (prune, 2, oldest_base),
    ],
)
def test_a_claim_between_every_two_operations(
    clear_up: Callable[[Path, TermWriter], None],
    first: int,
    continued: Callable[[Path], Point],
    quick: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nobody pulls the plug here
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    template = quick / "template"
    built = build(template)
    claimed: Counter[str] = Counter()
    for place in itertools.count(first):
        run = quick / f"run{place}"
        shutil.copytree(template, run)
        zombie = copy.copy(built)
        zombie._run = run
        told = claimed_before(place, run, continued, lambda: clear_up(run, zombie))  # noqa: B023
        if told is None:
            break
        successor, event = told
        claimed[event] += 1
        successor.check()
        with pytest.raises(Fenced):
            zombie.apply_retention()
        shutil.rmtree(run)
    assert claimed.total() > 100, "retention does more than that"
    assert {"open", "os.listdir", "os.remove", "os.rename", "os.rmdir"} <= claimed.keys(), claimed


def claimed_before(
    place: int, run: Path, continued: Callable[[Path], Point], work: Callable[[], None]
) -> tuple[Successor, str] | None:
    """Do the work; the run is claimed before its n-th operation, which is told. None: it has not so many."""
    successors: list[tuple[Successor, str]] = []
    seen = itertools.count()

    def before(event: str) -> None:
        if next(seen) == place:
            successors.append((Successor(run, continued(run)), event))

    with OPERATIONS.watched(run, before):
        work()
    return successors[0] if successors else None


def test_what_lies_in_newer_terms_is_nobodys_to_remove(tmp_path: Path) -> None:
    """Whatever a plan says that was made before them."""
    writer = build(tmp_path / "run")
    stale = read_lineage(tmp_path / "run")
    successor = Successor(tmp_path / "run", newest_point(tmp_path / "run"))
    doomed = unreferenced(tmp_path / "run", [], writer.manifest.term)
    doomed += old_segments(tmp_path / "run", stale, 10**9)
    terms = {layout.term_of(path.inside) for path in doomed}
    assert terms == {1, 2} and successor.writer.manifest.term == 3


def test_whoever_is_fenced_in_the_midst_removes_nothing_more(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.touch()
    looks = itertools.count()

    def still_ours() -> None:
        if next(looks) == 1:
            raise Fenced("term 2 owns the run now")

    with pytest.raises(Fenced):
        remove(list(map(ondisk.place, paths)), still_ours)
    assert [path.exists() for path in paths] == [False, True, True]


def test_a_shadow_that_comes_late_to_its_claim_is_fenced(tmp_path: Path) -> None:
    """It stood still from its start on, and others have gone on with the run meanwhile."""
    run = tmp_path / "run"
    TermWriter(run, None, RULES, known=Known(0, ("ours",))).commit(snapshot(2))
    TermWriter(run, Point(1, 2), RULES, known=Known(1, ("theirs",))).commit(snapshot(5))
    with pytest.raises(Fenced, match="claimed term 2"):
        TermWriter(run, Point(1, 3), RULES, known=Known(1, ("ours",)))
    assert newest_point(run) == Point(2, 5)
    assert ondisk.term_numbers(run) == [2, 1], "a claim that is refused leaves nothing"


def test_shadows_of_one_attach_follow_each_other(tmp_path: Path) -> None:
    run = tmp_path / "run"
    known = [Known(0, ("a",)), Known(0, ("a",)), Known(1, ("b", "a")), Known(2, ("b",))]
    for step, seen in enumerate(known):
        continues = newest_point(run) if step else None
        TermWriter(run, continues, RULES, known=seen).commit(snapshot(step))
        if step == 1:
            ondisk.term_dir(run, 3).mkdir()  # of one that was killed in the midst of its claim
    assert newest_point(run) == Point(5, 3)
    with pytest.raises(Fenced):  # who attached before and handed its state on
        TermWriter(run, Point(2, 1), RULES, known=Known(2, ("a",)))


def test_a_claim_goes_on_behind_what_was_claimed_since_the_handover(tmp_path: Path) -> None:
    """A shadow that was asked for its state may claim its term, and write, after it has answered."""
    run = tmp_path / "run"
    TermWriter(run, None, RULES, known=Known(0, ("a",))).commit(snapshot(4))
    TermWriter(run, Point(1, 4), RULES, known=Known(0, ("a",), step=4)).commit(snapshot(5))
    told = Point(1, 5)  # by the one that has written to term 2 since
    ours = TermWriter(run, told, RULES, known=Known(1, ("b", "a"), step=5)).manifest
    assert ours.continues == Point(2, 5) and newest_point(run) == Point(2, 5)

    known = Known(1, ("b", "a"), step=9)
    assert known.place(run, told) == Point(3, 9), "our shadow has died, and nobody was told"
    back = known._replace(attaches=("c",), left=("b", "a"))
    assert back.place(run, told) == told, "training has gone back since"
    back.check(run, [3, 2, 1])  # nobody else has claimed it
    assert known._replace(step=3).place(run, Point(1, 3)) == Point(1, 3)
    assert known._replace(attaches=("b",)).place(run, told) == told
    assert Known(0, ("a",), step=7).place(run, None) == Point(2, 7)


def test_who_clears_up_leaves_a_claim_alone_that_is_under_way(tmp_path: Path) -> None:
    run = tmp_path / "run"
    TermWriter(run, None, RULES).commit(snapshot(1))
    ondisk.term_dir(run, 2).mkdir()
    with pytest.raises(Fenced):
        TermWriter(run, Point(1, 1), RULES, known=Known(1))


def test_of_two_claims_at_once_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second was made between the first one's folder and its manifest."""
    run = tmp_path / "run"
    plain = runs.write_manifest

    def late(folder: Path, manifest: Manifest) -> None:
        monkeypatch.setattr(runs, "write_manifest", plain)
        TermWriter(run, None, RULES, known=Known(0, ("b",))).commit(snapshot(7))
        plain(folder, manifest)

    monkeypatch.setattr(runs, "write_manifest", late)
    with pytest.raises(Fenced):
        TermWriter(run, None, RULES, known=Known(0, ("a",)))
    assert newest_point(run) == Point(2, 7)
    assert ondisk.term_numbers(run) == [2], "a claim that comes too late leaves nothing"


def test_a_claim_that_the_disk_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again every minute: a disk that is full for days would fill with terms."""
    run = tmp_path / "run"
    TermWriter(run, None, RULES).commit(snapshot(1))

    def full(folder: Path, manifest: Manifest) -> None:
        temporary = ondisk.term_dir(folder, manifest.term) / f"{ondisk.TEMPORARY_PREFIX}manifest"
        temporary.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(runs, "write_manifest", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                TermWriter(run, Point(1, 1), RULES)
            assert ondisk.term_numbers(run) == [1]
    assert TermWriter(run, Point(1, 1), RULES).manifest.term == 2


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_log_whose_file_was_removed_is_told_and_goes_on_in_another(
    how: str, tmp_path: Path
) -> None:
    """Replaced: a backup was put back, or a tool that synchronises folders has written it anew."""
    writer = TermWriter(tmp_path / "run", None, RULES)
    writer.commit(snapshot(1))
    logged = log_of(tmp_path / "run", writer)
    logged.append([record(2)])
    (segment,) = ondisk.segments(tmp_path / "run", 1)
    if how == "removed":
        segment.unlink()
    else:
        shutil.copy(segment, tmp_path / "copy")
        (tmp_path / "copy").replace(segment)
    with pytest.raises(StoreError, match=how):
        logged.append([record(3)])
    writer.commit(snapshot(3))
    logged.append([record(4)])
    found, _ = find_newest(tmp_path / "run", None)
    assert found is not None and found.point.step == 4


def test_a_run_that_was_moved_away_is_not_made_anew(tmp_path: Path) -> None:
    run, away = tmp_path / "run", tmp_path / "away"
    writer = TermWriter(run, None, RULES)
    writer.commit(snapshot(1))
    logged = log_of(run, writer)
    run.rename(away)
    for write in (lambda: writer.commit(snapshot(2)), lambda: logged.append([record(2)])):
        with pytest.raises(StoreError, match="is gone"):
            write()
    assert not run.exists()
    away.rename(run)
    logged.append([record(2)])
    writer.commit(snapshot(3))
    assert newest_point(run) == Point(1, 3)
