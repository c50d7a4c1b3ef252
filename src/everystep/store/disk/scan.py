"""Stored files read from the disk itself, and kept nowhere: the page cache may still hold what a disk has
lost, and others need it for what they read more than once."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from everystep.errors import CorruptData
from everystep.store.disk.files import RunPath, open_file
from everystep.store.disk.stream import BLOCK_BYTES, REFUSED, go_buffered

_PIECE_BYTES = 16 << 20
_READERS = 2  # one reads while the other looks at what it has read


def scan(path: RunPath, size: int, look: Callable[[memoryview, int], None]) -> None:
    """Give every piece of a file that should have this size to `look`, with the byte it begins at."""
    try:
        fd = _open(path)
        try:
            found = os.fstat(fd).st_size
            if found != size:
                raise CorruptData(f"read {path}: {found} bytes, the index says {size}")
            _read(fd, size, look)
        finally:
            os.close(fd)
    except OSError as error:
        raise CorruptData(f"read {path}: {error.strerror}") from error


def _read(fd: int, size: int, look: Callable[[memoryview, int], None]) -> None:
    pieces = iter(range(0, size, _PIECE_BYTES))

    def work() -> None:
        blocks = min(_PIECE_BYTES, -(-size // BLOCK_BYTES) * BLOCK_BYTES)
        buffer = memoryview(mmap.mmap(-1, blocks))  # direct I/O wants whole pages
        for at in pieces:
            part = buffer[: min(_PIECE_BYTES, size - at)]
            _fill(fd, buffer, len(part), at)
            look(part, at)

    if size > _PIECE_BYTES:
        with ThreadPoolExecutor(_READERS, "everystep-scan") as pool:
            for done in [pool.submit(work) for _ in range(_READERS)]:
                done.result()
    elif size:
        work()


def _fill(fd: int, buffer: memoryview, size: int, at: int) -> None:
    """Some file systems give less than they are asked for: that is no damage, an early end is."""
    filled = 0
    while filled < size:
        count = _read_at(fd, buffer[filled:], at + filled)
        if not count:
            raise OSError(errno.EIO, f"it ends at byte {at + filled}")
        filled += count


def _read_at(fd: int, buffer: memoryview, at: int) -> int:
    try:
        return os.preadv(fd, [buffer], at)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        go_buffered(fd)
        return os.preadv(fd, [buffer], at)


def _open(path: RunPath) -> int:
    try:
        return open_file(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return open_file(path)
