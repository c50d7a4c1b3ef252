"""Copying large memory with several threads, none of which holds Python's lock."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_PIECE_BYTES = 16 << 20
_THREADS_MAX = 8
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_POPULATE_PIECE_BYTES = 64 << 20
_POPULATE_THREADS = 4  # more wait for each other
_libc = ctypes.CDLL(None)


def copy(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    """Each source into its target, of the same length."""
    pieces = [
        (target[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
        for target, source in zip(targets, sources, strict=True)
        for start in range(0, len(source), _PIECE_BYTES)
    ]
    threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)) // 2, len(pieces))
    if threads <= 1:
        for target, source in pieces:
            target[:] = source
        return
    with ThreadPoolExecutor(threads, "everystep-copy") as pool:
        for _ in pool.map(_move, pieces):
            pass


def clear(view: memoryview) -> None:
    """Fill it with zeros."""
    if len(view):
        ctypes.memset(address_of(view), 0, len(view))


def populate(address: int, size: int) -> None:
    """Make memory real that will be page-locked: a driver that does it on its way is three times slower.
    An old kernel refuses, and nothing is lost."""

    def piece(start: int) -> None:
        part = min(_POPULATE_PIECE_BYTES, size - start)
        _libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(part), _POPULATE_WRITE)

    with ThreadPoolExecutor(_POPULATE_THREADS, "everystep-populate") as pool:
        for _ in pool.map(piece, range(0, size, _POPULATE_PIECE_BYTES)):
            pass


def room_for(sources: Sequence[memoryview]) -> list[memoryview]:
    """Memory for a copy of each, one behind the other; it becomes real when it is written."""
    memory = fresh(sum(len(source) for source in sources))
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


def _move(piece: tuple[memoryview, memoryview]) -> None:
    target, source = piece
    ctypes.memmove(address_of(target), address_of(source), len(source))


def address_of(view: memoryview) -> int:
    """Where a writable view begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
