"""Copies by several threads are copies."""

from __future__ import annotations

import os

import pytest

from everystep import native
from everystep.lane import memory


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("size", [0, 1, 4095, 3 * 4096 + 5, (2 << 20) + 7])
def test_copies(size: int, threads: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "COPY_THREADS", threads)
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(memory, "_PIECE_BYTES", 1000)
    sources = [
        memoryview(bytearray(os.urandom(size))),
        memoryview(bytearray(os.urandom(size // 3))),
    ]
    copies = memory.room_for(sources)
    memory.copy(copies, sources)
    assert copies == sources
    if size:
        copies[0][0] ^= 1
        assert copies[0] != sources[0], "a copy has memory of its own"


def test_room_is_taken_where_it_is_if_everything_fits() -> None:
    sources = [memoryview(bytearray(5)), memoryview(bytearray(8))]
    for size, inside in ((13, True), (20, True), (12, False)):
        given = memory.fresh(size)
        start = memory.address_of(given)
        rooms = [memory.address_of(room) for room in memory.room_for(sources, given)]
        assert (rooms == [start, start + 5]) is inside
        assert inside or rooms[1] == rooms[0] + 5
