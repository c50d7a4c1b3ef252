"""A commit on a disk that refuses one call: what took its place counts, whether its name was synced or not."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from everystep.core.retention import Rules
from everystep.store import commit, layout
from everystep.store.epoch import EpochWriter
from everystep.store.files import RunPath
from everystep.store.runs import read_lineage
from everystep.store.verify import verify_run

from .test_retention import snapshot


def test_a_sync_that_fails_behind_the_rename_loses_no_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest that names the base is there: taking its files back would damage what counts."""
    run = tmp_path / "run"
    writer = EpochWriter(run, None, Rules(3))
    writer.commit(snapshot(1))
    plain, folder = commit.sync_folder, layout.epoch_dir(run, 1)
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
    writer.retain()
    report = verify_run(run)
    assert report.problems == [] and report.valid == [3, 2, 1]
