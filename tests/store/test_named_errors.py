"""What the system refuses of an open descriptor says no path: the error that is told carries it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ondisk
import pytest

from everystep.core.retention import Rules
from everystep.format.base import Point
from everystep.store import layout
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.fetch import Fetcher
from everystep.store.bucket.objects import Objects
from everystep.store.bucket.ship import BaseShipper
from everystep.store.disk.commit import write_blocks, write_document
from everystep.store.disk.files import RunPath, read_file, sync_folder
from everystep.store.disk.meter import Throttle
from everystep.store.log import LogWriter
from everystep.store.runs import read_lineage
from everystep.store.term import TermWriter

from .small_store import build, snapshot
from .test_zombies import CENSUS, census_digest, record

Work = Callable[[RunPath], object]


def append(path: RunPath) -> None:
    log = LogWriter(path.root, "r" * 32, 1, census_digest(CENSUS))
    try:
        log.append([record(3)])
    finally:
        log.close()


# what is done, the calls that may be refused while it is, and what the file's name begins with then
WORKS: dict[str, tuple[Work, tuple[str, ...], str]] = {
    "a document": (
        lambda path: write_document(path, b"words"),
        ("write", "fsync"),
        ".everystep-tmp-name",
    ),
    "a file of a base": (
        lambda path: write_blocks(path, [b"block"]),
        ("pwrite", "ftruncate", "fsync"),
        "name",
    ),
    "a segment": (append, ("pwrite", "fdatasync"), "000001-"),
}
CASES = [(what, call) for what, (_, calls, _) in WORKS.items() for call in calls]


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def refused(*args: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, refused)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(("what", "call"), CASES)
def test_errors_of_descriptors_carry_the_path(
    what: str, call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, _, name = WORKS[what]
    folder = Path(layout.log_dir(tmp_path, 1)) if what == "a segment" else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    refuse(monkeypatch, call, number)
    with pytest.raises(OSError) as refusal:
        work(ondisk.place(folder / "name") if folder == tmp_path else RunPath(tmp_path))
    assert str(folder / name) in str(refusal.value)
    assert refusal.value.errno == number


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_folder_that_cannot_be_synced_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    refuse(monkeypatch, "fsync", number)
    with pytest.raises(OSError) as refusal:
        sync_folder(RunPath(tmp_path) / "folder")
    assert str(tmp_path / "folder") in str(refusal.value)


@pytest.mark.parametrize("call", ["write", "pwrite", "ftruncate", "fsync"])
def test_a_commit_that_fails_names_what_it_wrote(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    build(run, 200)
    writer = TermWriter(run, Point(2, 3), Rules(5))
    refuse(monkeypatch, call, errno.ENOSPC)
    with pytest.raises(Exception) as refusal:
        writer.commit(snapshot(3, 200))
    assert str(run / "terms" / "000003") in str(refusal.value)


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_fetch_that_fails_names_the_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "run", 200)
    url = f"file://{tmp_path / 'bucket'}"
    BaseShipper(Bucket(url), tmp_path / "run", 2, Throttle(0)).turn()
    lineage = read_lineage(tmp_path / "run")
    objects = Objects.of_directory(Bucket(url), tmp_path / "run")
    fetcher = Fetcher(objects, tmp_path / "run", tmp_path / "fetched")
    (tmp_path / "fetched").mkdir()
    refuse(monkeypatch, call, errno.ENOSPC)
    with pytest.raises(OSError) as refusal:
        fetcher.bases(lineage.candidates)
    assert str(tmp_path / "fetched" / "terms") in str(refusal.value)


def test_a_read_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"words")
    path = ondisk.place(tmp_path / "file")

    class Broken:
        def __init__(self, fd: int, mode: str) -> None:
            self._fd = fd

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self._fd)

        def fileno(self) -> int:
            return self._fd

        def read(self, most: int) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("builtins.open", Broken)
    with pytest.raises(OSError) as refusal:
        read_file(path)
    monkeypatch.undo()
    assert str(tmp_path / "file") in str(refusal.value)
