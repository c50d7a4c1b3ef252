"""Which of two tiers holds the newer lineage of a run: the local directory or the bucket behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class EpochMark(NamedTuple):
    """What tells an epoch from another one of the same number, and how far its bases go."""

    token: str
    step: int


Marks = Mapping[int, EpochMark]
Winner = Literal["local", "bucket", "neither"]


def newer_tier(local: Marks, bucket: Marks) -> Winner:
    """The tier whose newest epoch the other one does not have; of one epoch, the one with the newer base.
    "neither": both have gone on, each on its own."""
    if not bucket:
        return "local"
    if not local:
        return "bucket"
    mine, theirs = max(local), max(bucket)
    if mine == theirs and local[mine].token == bucket[mine].token:
        return "bucket" if bucket[theirs].step > local[mine].step else "local"
    if _knows(local, theirs, bucket):
        return "local"
    return "bucket" if _knows(bucket, mine, local) else "neither"


def _knows(tier: Marks, epoch: int, other: Marks) -> bool:
    return epoch in tier and tier[epoch].token == other[epoch].token
