"""What a look at a mapped file brings into memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import ondisk
import pytest

from everystep.core.census import Census
from everystep.format.base import Point
from everystep.format.log import LoggedRecord, census_digest
from everystep.store import log_reader
from everystep.store.disk.mapped import expect_hops, map_file, read_ahead
from everystep.store.log import LogWriter
from everystep.store.runs import Lineage

pytestmark = pytest.mark.usefixtures("plain_bodies")
RUN_ID = "cd" * 16
_MIB = 1 << 20
_SIZE = 32 * _MIB


def _resident_bytes(view: memoryview) -> int:
    pages = (ctypes.c_ubyte * (len(view) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(view)))
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(view)), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.fixture
def forgotten(tmp_path: Path) -> memoryview:
    """A mapped file of which the page cache holds nothing."""
    path = tmp_path / "data"
    path.write_bytes(b"\1" * _SIZE)
    _forget(path)
    return map_file(ondisk.place(path))


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _resident_bytes(map_file(ondisk.place(path))):
        pytest.skip("this file system keeps its files in memory")


def test_a_look_that_hops_reads_no_more_than_that(forgotten: memoryview) -> None:
    places = range(0, _SIZE, 8 * _MIB)
    expect_hops(forgotten, True)
    assert all(forgotten[at] == 1 for at in places)
    assert _resident_bytes(forgotten) <= len(places) * 16 * mmap.PAGESIZE
    expect_hops(forgotten, False)
    assert forgotten[4 * _MIB] == 1
    assert _resident_bytes(forgotten) > (len(places) + 1) * 16 * mmap.PAGESIZE


def test_an_empty_file_can_be_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    expect_hops(map_file(ondisk.place(path)), True)


def test_a_log_is_not_read_for_its_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large records only those that are wanted come in, and what the disk reads ahead of them."""
    size = 4 * _MIB
    ondisk.term_dir(tmp_path, 1).mkdir(parents=True)
    census = Census((), (), "exact")
    writer = LogWriter(tmp_path, RUN_ID, 1, census_digest(census))
    writer.append([LoggedRecord(s + 1, s, memoryview(bytes(size))) for s in range(32)])
    path = Path(writer.end[0])
    writer.close()
    _forget(path)
    views = []
    monkeypatch.setattr(
        log_reader, "map_file", lambda path: views.append(map_file(path)) or views[-1]
    )
    lineage = Lineage(RUN_ID, [], [], ((1, None),))
    reader = log_reader.read_log(tmp_path, lineage, Point(1, 31), census)
    assert [record.step for record in reader] == [32]
    assert size < _resident_bytes(views[0]) < 6 * size


def test_what_is_read_ahead_comes_without_a_look(forgotten: memoryview) -> None:
    read_ahead(forgotten, 0, _SIZE)
    deadline = time.monotonic() + 20
    while _resident_bytes(forgotten) < _SIZE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _resident_bytes(forgotten) == _SIZE
