"""Which of two tiers holds the newer lineage of a run: the local directory or the bucket behind it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple


class EpochMark(NamedTuple):
    """What tells an epoch from another one of the same number, and how far it goes: by bases, or by the log
    behind them."""

    token: str
    step: int


class Tier(NamedTuple):
    """What one tier knows of the run."""

    marks: Mapping[int, EpochMark]
    continued: Mapping[int, int] = MappingProxyType(
        {}
    )  # epochs before the newest, up to which step
    over: frozenset[str] = frozenset()  # tokens of epochs that somebody has decided against


Winner = Literal["local", "bucket", "neither"]


def newer_tier(local: Tier, bucket: Tier) -> Winner:
    """The tier that has seen everything of the other one and gone on; of one epoch, the one that goes
    further. "neither": both have gone on, each on its own, and each holds what the other never saw."""
    if not bucket.marks:
        return "local"
    if not local.marks:
        return "bucket"
    mine, theirs = max(local.marks), max(bucket.marks)
    if mine == theirs and local.marks[mine].token == bucket.marks[mine].token:
        return "bucket" if bucket.marks[theirs].step > local.marks[mine].step else "local"
    if _has_seen(local, theirs, bucket):
        return "local"
    return "bucket" if _has_seen(bucket, mine, local) else "neither"


def _has_seen(tier: Tier, epoch: int, other: Tier) -> bool:
    """Whether a tier knows another one's newest epoch as far as that goes, or was told to pass it over."""
    there, here = other.marks[epoch], tier.marks.get(epoch)
    if there.token in tier.over:
        return True
    known = here is not None and here.token == there.token
    return known and there.step <= max(here.step if here else -1, tier.continued.get(epoch, -1))
