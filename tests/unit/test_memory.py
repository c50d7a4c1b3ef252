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
