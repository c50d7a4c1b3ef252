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


def room_for(sources: Sequence[memoryview]) -> list[memoryview]:
    """Memory for a copy of each, one behind the other; it becomes real when it is written."""
    memory = _fresh(sum(len(source) for source in sources))
    rooms, at = [], 0
    for source in sources:
        rooms.append(memory[at : at + len(source)])
        at += len(source)
    return rooms


def _fresh(size: int) -> memoryview:
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
