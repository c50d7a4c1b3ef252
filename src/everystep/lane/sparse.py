"""Finds the words of a payload that are not zero, by several threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from everystep import native
from everystep.core.census import Census
from everystep.core.events import Event, Sparse, used_ranges
from everystep.format.sparse import BLOCK_WORDS, Ranges, block_counts, split, stored_bytes
from everystep.lane.memory import COPY_THREADS, address_of, fresh

_WORTH_BYTES = 1 << 16  # smaller payloads are kept as they are
_SHARE_MAX = 4  # what is not a quarter of the payload's size is not worth it
_SAMPLED_BLOCKS = 64


def pack_sparse(
    events: Sequence[Event], payload: memoryview, census: Census
) -> tuple[Sparse, memoryview] | None:
    """The payload's words that are not zero, if they take much less room than all of them."""
    if len(payload) < _WORTH_BYTES or native.library() is None:
        return None
    ranges = used_ranges(events, census)
    table = _table(ranges, address_of(payload))
    blocks = int(block_counts(ranges).sum())
    if _looks_dense(table, blocks, len(payload)):
        return None
    counts, masks = _find(table, blocks, 1)
    sparse = Sparse(len(payload), len(counts), int(counts.sum()))
    if not len(counts):  # no event speaks of any of it
        return sparse, memoryview(b"")
    if _SHARE_MAX * stored_bytes(sparse) > len(payload):
        return None
    room = fresh(stored_bytes(sparse))
    words = split(sparse, room)
    words.counts[:] = counts
    starts = np.cumsum(counts, dtype=np.int64) - counts
    native.gather_words(table, masks, starts, words.places, words.values, COPY_THREADS)
    return sparse, room


def _table(ranges: Ranges, address: int) -> np.ndarray:
    table = np.zeros((len(ranges), 3), np.int64)
    if ranges:
        table[:, :2] = ranges
        table[:, 0] += address
        blocks = block_counts(ranges)
        table[:, 2] = np.cumsum(blocks) - blocks
    return table


def _looks_dense(table: np.ndarray, blocks: int, payload_bytes: int) -> bool:
    """A few blocks say that it is not worth it, whatever the others are like."""
    counts, _ = _find(table, blocks, max(1, blocks // _SAMPLED_BLOCKS))
    sampled = min(payload_bytes, 4 * BLOCK_WORDS * len(counts))
    return 6 * _SHARE_MAX * int(counts.sum()) > 2 * sampled


def _find(table: np.ndarray, blocks: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """How many there are in every `stride`-th block, and a bit for each of its words."""
    counts = np.zeros(-(-blocks // stride), np.uint32)
    masks = np.frombuffer(fresh(len(counts) * BLOCK_WORDS // 8), np.uint64)
    native.find_words(table, counts, masks, stride, COPY_THREADS)
    return counts, masks
