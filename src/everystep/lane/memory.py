"""Copying large memory with several threads, none of which holds Python's lock."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from everystep import native
from everystep.native.digests import Run, add_digests

_PIECE_BYTES = 16 << 20
COPY_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # the other half is the trainer's
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_POPULATE_PIECE_BYTES = 64 << 20
_POPULATE_THREADS = 4  # more wait for each other
_libc = ctypes.CDLL(None, use_errno=True)


def copy(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Each source into its target, of the same length."""
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if len(s)]
    if COPY_THREADS <= 1 or sum(len(s) for _, s in pairs) < _PIECE_BYTES:
        for target, source in pairs:
            target[:] = source
        return
    move([(address_of(t), address_of(s), len(s)) for t, s in pairs], COPY_THREADS)


def move(rows: list[tuple[int, int, int]], threads: int) -> None:
    """Bytes from one address to another (to, from, how many), all of them by several threads."""
    if native.copy(rows, threads):
        return
    pieces = [
        (to + at, start + at, min(_PIECE_BYTES, size - at))
        for to, start, size in rows
        for at in range(0, size, _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(threads, "everystep-copy") as pool:
        for _ in pool.map(lambda piece: ctypes.memmove(*piece), pieces):
            pass


def clear(view: memoryview) -> None:
    """Fill it with zeros."""
    if len(view):
        ctypes.memset(address_of(view), 0, len(view))


def digests(views: Sequence[memoryview], widths: Sequence[int]) -> list[int]:
    """Of each view, whose elements have so many bytes; the trainer computes the same of its tensors
    (`native.digests`). A bit that flips always shows, and so do two elements that change places."""
    rows = [
        Run(address_of(view) if len(view) else 0, len(view) // width, width, tensor=number)
        for number, (view, width) in enumerate(zip(views, widths, strict=True))
    ]
    sums = np.zeros(len(rows), np.int64)
    add_digests(rows, sums, COPY_THREADS)
    return [int(number) for number in sums]


def populate(address: int, size: int) -> int:
    """Make memory real, by several threads: one clears less than 2 GB/s. Returns 0 or what went wrong, as
    an errno: an old kernel knows no such call (EINVAL)."""

    def piece(start: int) -> int:
        part = min(_POPULATE_PIECE_BYTES, size - start)
        done = _libc.madvise(
            ctypes.c_void_p(address + start), ctypes.c_size_t(part), _POPULATE_WRITE
        )
        return ctypes.get_errno() if done else 0

    with ThreadPoolExecutor(_POPULATE_THREADS, "everystep-populate") as pool:
        return max(pool.map(piece, range(0, size, _POPULATE_PIECE_BYTES)), default=0)


def room_for(sources: Sequence[memoryview], memory: memoryview | None = None) -> list[memoryview]:
    """Room for a copy of each, one behind the other: in `memory` if they fit, else in memory that becomes
    real when it is written."""
    size = sum(len(source) for source in sources)
    if memory is None or len(memory) < size:
        memory = fresh(size)
    rooms, at = [], 0
    for source in sources:
        rooms.append(memory[at : at + len(source)])
        at += len(source)
    return rooms


def fresh(size: int) -> memoryview:
    """Private memory in huge pages: faulting small ones in takes four times as long as the copy."""
    if not size:
        return memoryview(b"")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def address_of(view: memoryview) -> int:
    """Where a writable view begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
