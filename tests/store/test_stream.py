"""Files written past the page cache are, byte for byte, what was appended; also where that is refused."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import ondisk
import pytest

from everystep.store.disk import stream
from everystep.store.disk.stream import StreamWriter

BUFFER = 8192
SIZES = [0, 1, 4095, 4096, BUFFER, BUFFER + 1, 5 * BUFFER - 1]


def write(path: Path, data: bytes) -> StreamWriter:
    writer = StreamWriter(ondisk.place(path), buffer_bytes=BUFFER)
    try:
        for start in range(0, len(data), 1000):
            writer.append(memoryview(data)[start : start + 1000])
        writer.finish()
    finally:
        writer.close()
    return writer


@pytest.mark.parametrize("size", SIZES)
def test_what_was_appended_is_there(size: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    assert write(tmp_path / "file", data).bytes == size
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("refused", ["open", "write"])
def test_refused_direct_writes_go_through_the_page_cache(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, written = os.open, os.pwrite
    direct: set[int] = set()

    def open_(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if refused == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        fd = opened(path, flags & ~os.O_DIRECT, *args, **more)
        direct.update({fd} if flags & os.O_DIRECT else ())
        return fd

    def pwrite(fd: int, *args: Any) -> int:
        if fd in direct:
            direct.discard(fd)
            raise OSError(errno.EINVAL, "refused")
        return written(fd, *args)

    monkeypatch.setattr(stream.os, "open", open_)
    monkeypatch.setattr(stream.os, "pwrite", pwrite)
    data = os.urandom(3 * BUFFER + 17)
    assert not write(tmp_path / "file", data).direct
    assert (tmp_path / "file").read_bytes() == data


def test_two_direct_writes_refused_at_once_both_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, both = os.pwrite, threading.Barrier(2)
    late = threading.Lock()
    refusals = iter([True, True])

    def pwrite(fd: int, *args: Any) -> int:
        if next(refusals, False):
            both.wait(10)  # issued together, told one after the other
            if not late.acquire(blocking=False):
                time.sleep(0.2)
            raise OSError(errno.EINVAL, "refused")
        return written(fd, *args)

    opened = os.open
    monkeypatch.setattr(
        stream.os, "open", lambda p, f, *a, **k: opened(p, f & ~os.O_DIRECT, *a, **k)
    )
    monkeypatch.setattr(stream.os, "pwrite", pwrite)
    data = os.urandom(4 * BUFFER + 17)
    write(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.pwrite
    monkeypatch.setattr(
        stream.os, "pwrite", lambda fd, data, at: written(fd, data[: max(1, len(data) // 3)], at)
    )
    monkeypatch.setattr(stream.os, "O_DIRECT", 0)
    data = os.urandom(2 * BUFFER + 5)
    write(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data


def test_a_full_disk_is_told_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(stream.os, "pwrite", full)
    with pytest.raises(OSError, match="full"):
        write(tmp_path / "file", bytes(4 * BUFFER))
    held = [fd.resolve() for fd in Path("/proc/self/fd").iterdir()]
    assert tmp_path / "file" not in held


@pytest.mark.parametrize("before", [0, 17, BUFFER - 8])
@pytest.mark.parametrize("behind", [0, 100, BUFFER, 9 * BUFFER + 3])
def test_a_hole_is_filled_after_what_comes_behind_it(
    before: int, behind: int, tmp_path: Path
) -> None:
    chance = random.Random(before + behind)
    first, last = chance.randbytes(before), chance.randbytes(behind)
    writer = StreamWriter(ondisk.place(tmp_path / "file"), buffer_bytes=BUFFER)
    writer.append(memoryview(first))
    fill = writer.leave_hole(8)
    assert fill is not None
    writer.append(memoryview(last))
    fill(b"12345678")
    writer.append(memoryview(b"end"))
    writer.finish()
    writer.close()
    assert (tmp_path / "file").read_bytes() == first + b"12345678" + last + b"end"


def test_a_hole_lies_in_one_buffer_and_there_is_one_at_a_time(tmp_path: Path) -> None:
    writer = StreamWriter(ondisk.place(tmp_path / "file"), buffer_bytes=BUFFER)
    writer.append(memoryview(bytes(BUFFER - 7)))
    assert writer.leave_hole(8) is None
    assert writer.leave_hole(7) is not None
    assert writer.leave_hole(1) is None
    writer.close()


def test_a_buffer_with_a_hole_is_not_written_before_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, places = os.pwrite, []

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        places.append(at)
        return written(fd, data, at)

    monkeypatch.setattr(stream.os, "pwrite", pwrite)
    writer = StreamWriter(ondisk.place(tmp_path / "file"), buffer_bytes=BUFFER)
    fill = writer.leave_hole(8)
    assert fill is not None
    writer.append(memoryview(bytes(6 * BUFFER)))
    assert places and 0 not in places
    fill(b"12345678")
    writer.finish()
    writer.close()
    assert sorted(places) == [n * BUFFER for n in range(7)]
