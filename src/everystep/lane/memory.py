"""Copying large memory with several threads, none of which holds Python's lock."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

_PIECE_BYTES = 32 << 20
_THREADS_MAX = 8


def duplicate(sources: Sequence[memoryview]) -> list[memoryview]:
    """Copies of all of them, one behind the other in memory of their own."""
    total = sum(len(source) for source in sources)
    if not total:
        return [memoryview(b"") for _ in sources]
    memory = memoryview(mmap.mmap(-1, total))
    copies, at = [], 0
    for source in sources:
        copies.append(memory[at : at + len(source)])
        at += len(source)
    pieces = [
        (copy[start : start + _PIECE_BYTES], source[start : start + _PIECE_BYTES])
        for copy, source in zip(copies, sources, strict=True)
        for start in range(0, len(source), _PIECE_BYTES)
    ]
    threads = max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // 2, len(pieces)))
    with ThreadPoolExecutor(threads, "everystep-copy") as pool:
        for _ in pool.map(_move, *zip(*pieces, strict=True)):
            pass
    return copies


def _move(target: memoryview, source: memoryview) -> None:
    ctypes.memmove(_address(target), _address(source), len(source))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
