"""What somebody plants in a run, where it lives: what everystep removes it removes without a look at what it
is, and nothing of it holds anything up."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import ondisk
import pytest
from exact.test_durable_log import sgd

import everystep
from everystep.cli.prune import prune_run
from everystep.core.retention import Rules
from everystep.errors import EverystepError
from everystep.format.base import Point
from everystep.store import retention
from everystep.store.disk.files import RunPath
from everystep.store.runs import read_lineage
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run

from .test_retention import snapshot

TEMPORARY = f"{ondisk.TEMPORARY_PREFIX}x"


def link(path: Path, bait: Path) -> None:
    path.symlink_to(bait)


def pipe(path: Path, bait: Path) -> None:
    os.mkfifo(path)


def hard_link(path: Path, bait: Path) -> None:
    path.hardlink_to(bait / "file")


@pytest.mark.parametrize("plant", [link, pipe, hard_link])
def test_what_is_planted_in_a_base_goes_and_the_bait_stays(
    plant: object, tmp_path: Path, bait: Path
) -> None:
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(1))
    for step in (1, 2):
        writer.commit(snapshot(step, thawed=step))
    places = [folder / TEMPORARY for folder in (*ondisk.base_dirs(run), *ondisk.part_dirs(run))]
    # of no base: what has the name of a base's file, or of a folder for them, is a leftover
    gone, part, other = (ondisk.part_dir(run, 1, step) for step in (7, 8, 9))
    gone.mkdir(parents=True)
    places += [gone / ondisk.WEIGHTS, gone / ondisk.INDEX, gone.parents[1] / ondisk.BASE]
    part.parent.mkdir(parents=True)
    other.parents[1].mkdir()
    places += [part, other.parent]
    for place in places:
        plant(place, bait)  # type: ignore[operator]
    assert prune_run(run, {}, dry_run=True, force=False)["frees_bytes"] > 0
    writer.apply_retention()
    assert not any(map(os.path.lexists, places))
    assert [folder.name for folder in ondisk.base_dirs(run)] == [f"{2:012d}"]
    assert [c.entry.step for c in read_lineage(run).candidates] == [2]
    assert verify_run(run).problems == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path, bait: Path) -> None:
    """A link where a base would lie, and a folder where a file would: retention goes on around them."""
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(1))
    for step in (1, 2):
        writer.commit(snapshot(step, thawed=step))
    base = ondisk.base_dir(run, 1, 9)
    link(base, bait)
    folder = ondisk.part_dir(run, 1, 1) / TEMPORARY
    folder.mkdir()
    assert prune_run(run, {}, dry_run=True, force=False)["frees_bytes"] > 0
    writer.apply_retention()
    assert base.is_symlink() and folder.is_dir()
    assert list(ondisk.part_dir(run, 1, 1).iterdir()) == [folder]


def test_one_that_cannot_be_removed_holds_back_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = tmp_path / "run", retention.remove_file
    writer = TermWriter(run, None, Rules(1))
    for step in (1, 2):
        writer.commit(snapshot(step, thawed=step))

    def refuses_one(path: RunPath) -> None:
        if path.name == ondisk.INDEX:
            raise PermissionError(errno.EPERM, "it is immutable", str(path))
        plain(path)

    monkeypatch.setattr(retention, "remove_file", refuses_one)
    with pytest.raises(PermissionError, match="immutable"):
        writer.apply_retention()
    assert [p.name for p in ondisk.part_dir(run, 1, 1).iterdir()] == [ondisk.INDEX]
    assert not (ondisk.base_dir(run, 1, 1) / ondisk.BASE).exists()


PLACES = ["bases", "a base", "the folder of terms", "a term", "parts", "a part"]


@pytest.mark.parametrize("place", PLACES)
def test_nothing_goes_behind_a_link_in_the_place_of_a_folder(place: str, tmp_path: Path) -> None:
    """What lies there has the names and the depth of what would go, to the last byte; what stays lies in a
    later term, which is as it was."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    earlier = TermWriter(run, None, Rules(3))
    for step in (1, 2, 3):
        earlier.commit(snapshot(step, thawed=step))
    writer = TermWriter(run, Point(1, 3), Rules(1))
    writer.commit(snapshot(4, thawed=4))
    base = ondisk.base_dir(run, 1, 1)
    part = ondisk.part_dir(run, 1, 1)
    (part / TEMPORARY).write_bytes(b"a leftover")
    at = {"a base": base, "bases": base.parent, "a term": ondisk.term_dir(run, 1)}
    at |= {"parts": part.parent, "a part": part}
    linked = at.get(place, run / "terms")
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    before = {p: p.lstat().st_ctime_ns for p in elsewhere.rglob("*")}
    baits = [p.relative_to(elsewhere).parts for p in before if p.name == ondisk.WEIGHTS]
    assert len(baits) == {"bases": 3, "the folder of terms": 4, "a term": 3}.get(place, 1)
    for remove in (
        writer.apply_retention,
        lambda: prune_run(run, {"keep_last": 1}, dry_run=False, force=True),
        lambda: writer.commit(snapshot(5, thawed=5)),
        lambda: retention.remove_base(run, 1, 1),
    ):
        with contextlib.suppress(EverystepError, OSError):
            remove()
    after = {p: p.lstat().st_ctime_ns for p in elsewhere.rglob("*")}
    in_a_base = place in ("a base", "parts", "a part")
    if in_a_base:  # the others were removed, and it was not
        assert not ondisk.base_dir(run, 1, 2).exists()
    assert after == before, "what lies behind the link was changed"
    # in the place of what is ours in a base a link goes, as it would in the place of a file
    assert linked.is_symlink() == (place not in ("parts", "a part"))


def test_a_shadow_removes_nothing_behind_a_link(tmp_path: Path) -> None:
    """Planted while it trains: every base from then on would have the older ones removed."""
    run_dir, elsewhere, job = tmp_path / "run", tmp_path / "elsewhere", sgd()
    options = {"durable_every": "1h", "keep": everystep.Keep(last=1), "on_lag": "wait"}
    with everystep.attach(job.model, job.optimizer, run=run_dir, **options) as run:
        for step in run.steps(4):
            job.turn(step)
        run.flush()
        bases = ondisk.base_dir(run_dir, 1, 4).parent
        bases.rename(elsewhere)
        bases.symlink_to(elsewhere)
        for step in (1, 2):  # bases that no rule keeps
            shutil.copytree(elsewhere / f"{4:012}", elsewhere / f"{step:012}", dirs_exist_ok=True)
        before = sorted(elsewhere.rglob("*"))
        assert elsewhere / "000000000001/parts/000000" / ondisk.WEIGHTS in before
        for step in run.steps(6):
            job.turn(step)
        with pytest.raises(EverystepError, match="symbolic link"):
            run.flush(60)
        assert sorted(elsewhere.rglob("*")) == before
        bases.unlink()
        elsewhere.rename(bases)
        assert run.flush(60) == 6
    assert everystep.open_run(run_dir).steps == [6]
    assert not (bases / f"{1:012}").exists(), "it goes where it is reached by no link"


def test_what_has_another_name_stays_in_a_base_that_goes(tmp_path: Path) -> None:
    """Somebody's notes: they stay where they are, and all that is ours goes from around them."""
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(1))
    for step in (1, 2):
        writer.commit(snapshot(step, thawed=step))
    base = ondisk.part_dir(run, 1, 1)
    notes = [base / name for name in ("notes.txt", "weights.safetensors.bak", ".hidden")]
    for note in notes:
        note.write_bytes(b"mine")
    writer.apply_retention()
    assert sorted(base.iterdir()) == sorted(notes)
    assert prune_run(run, {}, dry_run=True, force=False)["frees_bytes"] == 0
    prune_run(run, {"keep_last": 1}, dry_run=False, force=True)
    writer = TermWriter(run, Point(1, 2), Rules(1))
    writer.commit(snapshot(3, thawed=3))
    writer.apply_retention()
    assert all(note.read_bytes() == b"mine" for note in notes)
    assert [c.entry.step for c in read_lineage(run).candidates] == [3]
    assert verify_run(run).problems == []


@pytest.fixture
def bait(tmp_path: Path) -> object:
    """A folder that is the same afterwards."""
    folder = tmp_path / "bait"
    folder.mkdir()
    names = ("file", ondisk.WEIGHTS, TEMPORARY)
    for name in names:
        (folder / name).write_bytes(b"bait")
    yield folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(
        names, b"bait"
    )


def test_pipes_in_every_folder_hold_nobody_up(tmp_path: Path) -> None:
    """Whoever opens one to read or write waits for the other end, and that never comes."""
    run_dir, planted = tmp_path / "run", set()

    def plant() -> None:
        for folder in (run_dir, *(path for path in run_dir.rglob("*") if path.is_dir())):
            for name in (TEMPORARY, "pipe", f"{ondisk.TEMPORARY_PREFIX}manifest.json"):
                if folder not in planted:
                    os.mkfifo(folder / name)
            planted.add(folder)

    def train() -> None:
        for life in (1, 2):
            job = sgd()
            options = {
                "durable_log": 1,
                "durable_every": 5,
                "keep": everystep.Keep(last=1),
                "on_lag": "wait",
            }
            with everystep.attach(job.model, job.optimizer, run=run_dir, **options) as run:
                for step in run.steps(20 * life):
                    job.turn(step)
                    if step % 5 == 1:
                        run.flush()
                        plant()
            done.append(run.step)

    done: list[int] = []
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(60)
    assert done == [20, 40], "somebody waits"
    assert len(planted) > 6
    assert everystep.open_run(run_dir).steps == [40]
    files = list(run_dir.rglob(ondisk.INDEX))
    assert len(files) == 1, "retention goes on"
    assert verify_run(run_dir).problems == []


def test_a_pipe_in_the_place_of_a_tag_holds_nobody_up(tmp_path: Path) -> None:
    """Tags are read before anything is removed: by the shadow behind every base, and by commands."""
    run_dir, done = tmp_path / "run", []
    pipe_at = ondisk.tag_path(run_dir, "x")

    def train() -> None:
        job = sgd()
        options = {"durable_every": 5, "keep": everystep.Keep(last=1), "on_lag": "wait"}
        with everystep.attach(job.model, job.optimizer, run=run_dir, **options) as run:
            for step in run.steps(20):
                job.turn(step)
                if step == 6:
                    pipe_at.parent.mkdir(exist_ok=True)
                    os.mkfifo(pipe_at)
                if step % 5 == 4:
                    try:
                        assert run.flush(60) == run.step
                    except EverystepError as error:  # of what was to be removed meanwhile
                        assert "it is a pipe" in str(error)
            done.append(f"it is {run.status()['health']}")
        done.append("closed")

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(60)
    waits = thread.is_alive()
    if waits:  # whoever waits for the other end has it now
        os.close(os.open(pipe_at, os.O_RDWR | os.O_NONBLOCK))
    assert not waits, f"somebody waits after {done}"
    assert done == ["it is degraded", "closed"]
    for command in ("ls", "verify", "status", "prune", "prune --dry-run"):
        words = [sys.executable, "-m", "everystep", *command.split(), str(run_dir)]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode in (0, 1, 2) and "Traceback" not in told.stderr, told.stderr
        if command != "status":
            assert "it is a pipe" in " ".join((told.stdout + told.stderr).split()), command
    pipe_at.unlink()
    assert prune_run(run_dir, {}, dry_run=False, force=False)["problems"] == []
    assert everystep.open_run(run_dir).steps == [20]
    assert verify_run(run_dir).problems == []
