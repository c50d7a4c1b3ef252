"""Payloads that are mostly zeros, as compressed gradients are: which 32-bit words are not zero, and what they
hold. Bits are kept as they are, so a negative zero and a NaN come back.

Every range of the payload that an event speaks of is cut into blocks of 65536 words. Stored are, one behind
the other: how many words of each block are not zero (32 bits each), their places in the block (16 bits each,
filled up to whole words), and the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from everystep.core.events import Sparse
from everystep.errors import CorruptData

BLOCK_WORDS = 1 << 16
_BLOCK_BYTES = 4 * BLOCK_WORDS

Ranges = Sequence[tuple[int, int]]  # start and bytes


class SparseWords(NamedTuple):
    """Views of one memory. Block by block."""

    counts: np.ndarray
    places: np.ndarray
    values: np.ndarray


def block_counts(ranges: Ranges) -> np.ndarray:
    """How many blocks each range has."""
    sizes = np.array([size for _, size in ranges], np.int64)
    return -(-sizes // _BLOCK_BYTES)


def block_starts(ranges: Ranges) -> np.ndarray:
    """The word of the payload that each block begins with."""
    counts = block_counts(ranges)
    first = np.repeat(np.array([start // 4 for start, _ in ranges], np.int64), counts)
    earlier = np.repeat(counts.cumsum() - counts, counts)  # blocks of the ranges before
    starts: np.ndarray = first + (np.arange(len(earlier)) - earlier) * BLOCK_WORDS
    return starts


def block_words(ranges: Ranges) -> np.ndarray:
    """How many words each block has: the last one of a range may be shorter."""
    words = np.array([-(-size // 4) for _, size in ranges], np.int64)
    counts = block_counts(ranges)
    place = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    sizes: np.ndarray = np.minimum(np.repeat(words, counts) - place * BLOCK_WORDS, BLOCK_WORDS)
    return sizes


def part_ends(sparse: Sparse) -> tuple[int, int]:
    """Where the counts end, and where the places do."""
    middle = 4 * sparse.blocks
    return middle, middle + -(-2 * sparse.words // 4) * 4


def stored_bytes(sparse: Sparse) -> int:
    return part_ends(sparse)[1] + 4 * sparse.words


def split(sparse: Sparse, data: memoryview) -> SparseWords:
    """The three parts of a stored payload, or of memory for one."""
    if len(data) != stored_bytes(sparse):
        raise CorruptData(
            f"sparse payload: {len(data)} bytes, expected {stored_bytes(sparse)} for {sparse.words} words"
        )
    middle, end = part_ends(sparse)
    return SparseWords(
        np.frombuffer(data[:middle], np.uint32),
        np.frombuffer(data[middle:end], np.uint16)[: sparse.words],
        np.frombuffer(data[end:], np.uint32),
    )


def checked(sparse: Sparse, data: memoryview, ranges: Ranges) -> SparseWords:
    """What was stored, if it belongs to these ranges."""
    words = split(sparse, data)
    sizes = block_words(ranges)
    fits = len(sizes) == sparse.blocks and (words.counts <= sizes).all()
    if not fits or words.counts.sum(dtype=np.int64) != sparse.words:
        raise CorruptData("sparse payload: it does not fit the events it came with")
    filled = words.counts > 0
    if filled.any():
        begins = np.cumsum(words.counts[filled], dtype=np.int64) - words.counts[filled]
        if (np.maximum.reduceat(words.places, begins) >= sizes[filled]).any():
            raise CorruptData("sparse payload: a word lies outside of its block")
    return words


def expand(sparse: Sparse, data: memoryview, ranges: Ranges) -> memoryview:
    """The payload as it was; what no event speaks of is zero."""
    words = checked(sparse, data, ranges)
    full = np.zeros(-(-sparse.bytes // 4), np.uint32)
    full[np.repeat(block_starts(ranges), words.counts) + words.places] = words.values
    return full.data.cast("B")[: sparse.bytes]
