"""Stored files, mapped: nothing is read before somebody looks at it, or is about to."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress

from everystep.errors import CorruptData
from everystep.store.disk.files import RunPath, open_file

_READERS = min(8, 2 * len(os.sched_getaffinity(0)))
_PIECE_BYTES = 16 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ, of Linux 5.14
_libc = ctypes.CDLL(None)


def map_file(path: RunPath) -> memoryview:
    """The bytes of a file; writing to them changes nothing but this copy."""
    try:
        fd = open_file(path)
    except OSError as error:
        raise CorruptData(f"read {path}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        if not size:
            return memoryview(b"")
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
    except (OSError, OverflowError, ValueError) as error:  # a size that no address space has
        raise CorruptData(f"map {path} of {size} bytes: {error}") from error
    finally:
        os.close(fd)


def expect_hops(view: memoryview, hops: bool) -> None:
    """Whether the next look at a mapped file lies far behind the last one: then what is looked at is brought
    in, and not megabytes around it. A kernel may not care."""
    if isinstance(view.obj, mmap.mmap):
        with suppress(OSError):
            view.obj.madvise(mmap.MADV_RANDOM if hops else mmap.MADV_NORMAL)


def read_ahead(view: memoryview, begin: int, end: int) -> None:
    """These bytes of a mapped file will be wanted soon. Page faults of one reader bring them in one after the
    other; a disk gives more to several, each of whom maps a whole piece at once. If the disk fails, whoever
    looks will see.

    Older kernels are asked to bring it in; where a piece can be mapped, that came at half the rate (Linux
    6.18, ext4).
    """
    if end - begin <= _PIECE_BYTES:
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    pieces = iter(range(begin // mmap.PAGESIZE * mmap.PAGESIZE, end, _PIECE_BYTES))

    def work() -> None:
        for at in pieces:
            piece = ctypes.c_void_p(start + at), ctypes.c_size_t(min(_PIECE_BYTES, len(view) - at))
            if _libc.madvise(*piece, _POPULATE_READ):
                _libc.madvise(*piece, mmap.MADV_WILLNEED)

    for _ in range(_READERS):
        threading.Thread(target=work, name="everystep-read-ahead", daemon=True).start()
