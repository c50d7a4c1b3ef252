"""A commit on a disk that refuses one call: what took its place counts, be its name synced or not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from everystep.core.retention import Rules
from everystep.store import layout
from everystep.store.disk import commit
from everystep.store.disk.files import RunPath
from everystep.store.retention import remove_base
from everystep.store.runs import read_lineage
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run

from .test_retention import snapshot
from .test_zombies import log_of, newest_point, record


def test_folders_of_a_write_that_failed_before_its_first_file_go(tmp_path: Path) -> None:
    folder = Path(layout.part_dir(tmp_path, 1, 5, 0))
    folder.mkdir(parents=True)
    remove_base(tmp_path, 1, 5)
    assert not folder.parent.parent.exists()


def test_a_sync_that_fails_behind_the_rename_loses_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest that names the base is there: taking its files back would damage what counts."""
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(3))
    writer.commit(snapshot(1))
    plain, folder = commit.sync_folder, layout.term_dir(run, 1)
    left = [folder]

    def fails_once(path: RunPath) -> None:
        if path in left:
            left.remove(path)
            raise OSError(errno.EIO, "Input/output error", str(path))
        plain(path)

    monkeypatch.setattr(commit, "sync_folder", fails_once)
    with pytest.raises(OSError, match="Input/output"):
        writer.commit(snapshot(2))
    assert not left and verify_run(run).problems == []
    assert [c.entry.step for c in read_lineage(run).candidates] == [2, 1]
    synced: list[RunPath] = []
    monkeypatch.setattr(commit, "sync_folder", lambda path: (synced.append(path), plain(path)))
    assert writer.commit(snapshot(2)).step == 2
    assert folder in synced, "it was not said to be durable before"
    writer.commit(snapshot(3))  # refers to what the second wrote
    writer.apply_retention()
    report = verify_run(run)
    assert report.problems == [] and report.valid == [3, 2, 1]


@pytest.mark.parametrize("removes", [True, False], ids=["removes", "removes nothing"])
@pytest.mark.parametrize("synced", [0, 2])
def test_nobody_goes_on_from_a_batch_whose_sync_failed(
    synced: int, removes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache shows it, and no later sync brings it to the disk: what is built upon it is lost with it
    when the power goes."""
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(3))
    writer.commit(snapshot(1))
    log = log_of(run, writer)
    for step in range(2, 2 + synced):
        log.append([record(step)])
    plain, begun = os.fdatasync, iter([synced == 0])  # the first sync of a segment is its header's

    def fails(fd: int) -> None:
        if next(begun, False):
            return plain(fd)
        raise OSError(errno.EIO, "Input/output error")

    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "not removed")

    with monkeypatch.context() as patches:
        patches.setattr(os, "fdatasync", fails)
        if not removes:
            patches.setattr(os, "unlink", refuses)
        with pytest.raises(OSError, match="Input/output"):
            log.append([record(2 + synced)])
    assert newest_point(run).step == 1 + synced
    writer.commit(snapshot(9))
    log.append([record(10)])
    assert newest_point(run).step == 10
