"""What a look at a mapped file brings into memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest

from everystep.store.mapped import looked_at_here_and_there, map_file, read_ahead

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
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    view = map_file(path)
    if _resident_bytes(view):
        pytest.skip("this file system keeps its files in memory")
    return view


def test_a_look_here_and_there_reads_no_more_than_that(forgotten: memoryview) -> None:
    places = range(0, _SIZE, 8 * _MIB)
    with looked_at_here_and_there(forgotten):
        assert all(forgotten[at] == 1 for at in places)
    assert _resident_bytes(forgotten) <= len(places) * 16 * mmap.PAGESIZE


def test_afterwards_neighbours_are_read_too(forgotten: memoryview) -> None:
    with looked_at_here_and_there(forgotten):
        pass
    assert forgotten[0] == 1
    assert _resident_bytes(forgotten) > 16 * mmap.PAGESIZE


def test_an_empty_file_can_be_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    with looked_at_here_and_there(map_file(path)):
        pass


def test_what_is_read_ahead_comes_without_a_look(forgotten: memoryview) -> None:
    read_ahead(forgotten, 0, _SIZE)
    deadline = time.monotonic() + 20
    while _resident_bytes(forgotten) < _SIZE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _resident_bytes(forgotten) == _SIZE
