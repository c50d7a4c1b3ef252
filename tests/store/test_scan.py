"""Files read past the page cache are read whole, in pieces whose places are right."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import ondisk
import pytest

from everystep.bench.verify_speed import _snapshot
from everystep.core.retention import Rules
from everystep.errors import CorruptData
from everystep.store import bases
from everystep.store.disk import scan as scanning
from everystep.store.disk.scan import scan
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run


def seen(path: Path, size: int) -> bytes:
    found: dict[int, bytes] = {}
    scan(ondisk.place(path), size, lambda part, at: found.update({at: bytes(part)}))
    assert [at + len(found[at]) for at in sorted(found)][:-1] == sorted(found)[1:]
    return b"".join(found[at] for at in sorted(found))


@pytest.mark.parametrize("refuses", ["nothing", "to open", "to read", "whole pieces"])
@pytest.mark.parametrize("size", [0, 1, 4096, 8191, 8192, 70_000])
def test_every_byte_is_seen_once(
    size: int, refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = tmp_path / "file", random.Random(size).randbytes(size)
    path.write_bytes(data)
    monkeypatch.setattr(scanning, "_PIECE_BYTES", 8192)
    real_open, real_read = os.open, os.preadv
    asked: list[int] = []  # flags of what was opened
    refused: list[int] = []

    def opens(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        asked.extend([] if flags & os.O_DIRECTORY else [flags])
        if refuses == "to open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such thing here")
        return real_open(name, flags, *rest, **more)

    def reads(fd: int, buffers: list[memoryview], at: int) -> int:
        if refuses == "to read" and not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, "not like this")
        if refuses == "whole pieces":
            buffers = [buffers[0][: max(1, len(buffers[0]) // 2)]]
        return real_read(fd, buffers, at)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "preadv", reads)
    assert seen(path, size) == data
    assert asked[0] & os.O_DIRECT


def test_a_file_that_ends_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a whole piece, where no checksum would tell."""
    path = tmp_path / "file"
    path.write_bytes(bytes(24_576))
    monkeypatch.setattr(scanning, "_PIECE_BYTES", 8192)
    real_read = os.preadv

    def reads(fd: int, buffers: list[memoryview], at: int) -> int:
        return 0 if at >= 16_384 else real_read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", reads)
    with pytest.raises(CorruptData, match="it ends at byte 16384"):
        seen(path, 24_576)


def _refuse_to_map(path: Path) -> memoryview:
    raise AssertionError(f"{path} was mapped")


def test_verify_reads_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TermWriter(tmp_path / "run", None, Rules(1)).commit(_snapshot(1 << 20))
    monkeypatch.setattr(bases, "map_file", _refuse_to_map)
    report = verify_run(tmp_path / "run")
    assert not report.problems and report.bytes > 1 << 20


def test_a_base_is_read_back_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, snapshot = TermWriter(tmp_path / "run", None, Rules(1)), _snapshot(1 << 20)
    writer.commit(snapshot)
    writer.commit(snapshot._replace(step=snapshot.step + 1))
    monkeypatch.setattr(bases, "map_file", _refuse_to_map)
    writer.apply_retention()
    assert [entry.step for entry in writer.manifest.bases] == [snapshot.step + 1]


def test_what_is_not_as_it_should_be_is_said(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(CorruptData, match="No such file"):
        seen(path, 1)
    path.write_bytes(b"123")
    with pytest.raises(CorruptData, match="3 bytes, the index says 4"):
        seen(path, 4)


def test_what_a_look_finds_wrong_in_any_piece_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "_PIECE_BYTES", 8192)
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))

    def look(part: memoryview, at: int) -> None:
        if at == 81_920:
            raise CorruptData("here it is")

    with pytest.raises(CorruptData, match="here it is"):
        scan(ondisk.place(path), 100_000, look)
