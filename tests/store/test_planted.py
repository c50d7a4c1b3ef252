"""What somebody plants in a run, where it lives: what everystep removes it removes without a look at what it
is, and nothing of it holds anything up."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import ondisk
import pytest
from exact.test_durable_log import sgd

import everystep
from everystep.cli.prune import prune_run
from everystep.core.retention import Rules
from everystep.store import retention
from everystep.store.epoch import EpochWriter
from everystep.store.files import RunPath
from everystep.store.runs import read_lineage
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
    writer = EpochWriter(run, None, Rules(1))
    for step in (1, 2):
        writer.commit(snapshot(step, thawed=step))
    places = [folder / TEMPORARY for folder in ondisk.base_dirs(run)]
    gone = ondisk.base_dir(
        run, 1, 7
    )  # of no base: what has the name of a base's file is a leftover
    gone.mkdir()
    places += [gone / ondisk.WEIGHTS, gone / ondisk.INDEX]
    for place in places:
        plant(place, bait)  # type: ignore[operator]
    assert prune_run(run, {}, dry_run=True, force=False)["frees_bytes"] > 0
    writer.retain()
    assert not any(map(os.path.lexists, places)) and not gone.exists()
    assert [c.entry.step for c in read_lineage(run).candidates] == [2]
    assert verify_run(run).problems == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path, bait: Path) -> None:
    """A link where a base would lie, and a folder where a file would: retention goes on around them."""
    run = tmp_path / "run"
    writer = EpochWriter(run, None, Rules(1))
    for step in (1, 2):
        writer.commit(snapshot(step, thawed=step))
    base = ondisk.base_dir(run, 1, 9)
    link(base, bait)
    folder = ondisk.base_dir(run, 1, 1) / TEMPORARY
    folder.mkdir()
    assert prune_run(run, {}, dry_run=True, force=False)["frees_bytes"] > 0
    writer.retain()
    assert base.is_symlink() and folder.is_dir()
    assert list(ondisk.base_dir(run, 1, 1).iterdir()) == [folder]


def test_one_that_cannot_be_removed_holds_back_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = tmp_path / "run", retention.remove_file
    writer = EpochWriter(run, None, Rules(1))
    for step in (1, 2):
        writer.commit(snapshot(step, thawed=step))

    def refuses_one(path: RunPath) -> None:
        if path.name == ondisk.INDEX:
            raise PermissionError(errno.EPERM, "it is immutable", str(path))
        plain(path)

    monkeypatch.setattr(retention, "remove_file", refuses_one)
    with pytest.raises(PermissionError, match="immutable"):
        writer.retain()
    assert [p.name for p in ondisk.base_dir(run, 1, 1).iterdir()] == [ondisk.INDEX]


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
            options = {"durable_log": 1, "durable_every": 5, "keep_last": 1, "on_lag": "wait"}
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
