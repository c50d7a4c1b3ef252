"""Digests of memory: they tell what it holds, in which order. `digest.h` says what a digest is; here is the
table of what is to be digested, as C and CUDA read it, and the arithmetic for arrays of numpy or torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from everystep import native

KERNEL = Path(__file__).with_name("digest.cu")
KERNEL_RUNS = 80  # of one launch
LANES, PIECE = 32, 1 << 15
WORD_BYTES_MAX = 4
_CHUNK = 1 << 18  # words that numpy takes at a time
_BITS, _HIGH = (1 << 32) - 1, (1 << 32) - 64


class Run(NamedTuple):
    """Elements that follow each other both in memory and in their tensor."""

    address: int
    elements: int
    width: int  # bytes of an element
    start: int = 0  # elements of the tensor before the first
    tensor: int = 0  # number of the digest that they are added to


def table(runs: Sequence[Run]) -> tuple[np.ndarray, int]:
    """Runs of words, and how many pieces they have together."""
    address, elements, width, start, tensor = np.array(runs, np.uint64).reshape(-1, 5).T
    words = np.maximum(width // WORD_BYTES_MAX, 1)  # of an element
    pieces = -(-(elements * words).astype(np.int64) // PIECE)
    last = np.cumsum(pieces)
    columns = (address, elements * words, start * words, width // words, tensor, last - pieces)
    return np.stack(columns, 1).astype(np.uint64), int(last[-1]) if runs else 0


def add_digests(runs: Sequence[Run], sums: np.ndarray, threads: int) -> None:
    """Add the runs to the digests of their tensors."""
    loaded = native.library()
    if loaded is None:
        for run in runs:
            _add_digest(run, sums)
        return
    rows, pieces = table(runs)
    loaded.everystep_digests(rows.ctypes.data, len(rows), pieces, sums.ctypes.data, threads)


def weights(groups: Any, lanes: Any) -> Any:
    """Of every word in these groups: one for each lane, given as arange(LANES). Integers of 64 bits wrap."""
    return (factor(groups)[:, None] * (factor(~lanes) + 2 * lanes)).reshape(-1)


def factor(group: Any) -> Any:
    """`factor` of digest.h, of an array of signed integers."""
    x = (group << 6) + 0x6A09E640 & _BITS
    x = x ^ x >> 13 & _HIGH
    x = x * 0xAE2EB155 + (group >> 26) * 0x9E3779C0 + 0xBB67AE80 & _BITS
    x = x ^ x >> 11 & _HIGH
    x = x * 0x881ED163 + 0x3C6EF340 & _BITS
    x = x ^ x >> 12 & _HIGH
    x = x * 0xFAECBD39 + 0xA54FF500 & _BITS
    return x ^ x >> 13 & _HIGH | 1


def _add_digest(run: Run, sums: np.ndarray) -> None:
    width = min(run.width, WORD_BYTES_MAX)
    words_of_one = run.width // width
    memory = (ctypes.c_uint8 * (run.elements * run.width)).from_address(run.address)
    words = np.ctypeslib.as_array(memory).view(f"u{width}")
    start = run.start * words_of_one
    for at in range(0, len(words), _CHUNK):
        part = words[at : at + _CHUNK]
        first, skipped = divmod(start + at, LANES)
        last = -(-(start + at + len(part)) // LANES)
        own = weights(np.arange(first, last), np.arange(LANES))[skipped:][: len(part)]
        own_sum = sums[
            run.tensor : run.tensor + 1
        ]  # an array: numpy warns when a single number wraps
        own_sum += (part.astype(np.int64) * own).sum(dtype=np.int64)
