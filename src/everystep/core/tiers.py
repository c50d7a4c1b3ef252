"""Which of two tiers holds the newer lineage of a run: the local directory or the bucket behind it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple


class TermMark(NamedTuple):
    """What tells a term from another one of the same number, and how far it goes: by bases, or by the log
    behind them."""

    token: str
    step: int  # -1: it holds nothing


class Passed(NamedTuple):
    """Steps of a term that were decided against: those behind one, up to another one."""

    behind: int
    step: int

    def has(self, other: Passed) -> bool:
        return self.behind <= other.behind and other.step <= self.step


class Tier(NamedTuple):
    """What one tier knows of the run."""

    marks: Mapping[int, TermMark]
    # the terms that the newest goes on from, up to which step
    continued: Mapping[int, int] = MappingProxyType({})
    # tokens that were decided against, and which parts of them
    over: Mapping[str, Collection[Passed]] = MappingProxyType({})


Winner = Literal["local", "bucket", "neither"]


def newer_tier(local: Tier, bucket: Tier) -> Winner:
    """The tier that has seen everything of the other one and gone on; of one term, the one that goes
    further. "neither": both have gone on, each on its own, and each holds what the other never saw."""
    if not bucket.marks:
        return "local"
    if not local.marks:
        return "bucket"
    mine, theirs = max(local.marks), max(bucket.marks)
    if mine == theirs and local.marks[mine].token == bucket.marks[mine].token:
        ahead = bucket.marks[theirs].step - local.marks[mine].step
        lost = bucket.marks.keys() & local.continued.keys() - local.marks.keys()
        if ahead > 0 or (ahead == 0 and lost):
            return "bucket"
        return "neither" if unseen(local, bucket) else "local"
    if not unseen(local, bucket):
        return "local"
    return "neither" if unseen(bucket, local, claims=_has_decided(local, bucket)) else "bucket"


def _has_decided(tier: Tier, other: Tier) -> bool:
    """Whether somebody has passed something over that the other tier still goes on from: a claim behind that
    decision stands for it, though it holds nothing yet."""
    decided = ((token, part) for token, parts in tier.over.items() for part in parts)
    return any(not any(p.has(part) for p in other.over.get(token, ())) for token, part in decided)


def unseen(tier: Tier, other: Tier, *, claims: bool = True) -> list[TermMark]:
    """What the other tier's line ends with, as far as this one neither knows it nor was told to pass it
    over. `claims`: a claim that holds nothing yet counts too, as somebody may be training behind it, or has
    gone back to an earlier step."""
    ends = _ends(other)
    return [other.marks[e] for e in (ends if claims else ends[-1:]) if not _knows(tier, e, other)]


def furthest(tier: Tier) -> int:
    """The step at which its line ends; -1: it has none."""
    return _reach(tier, _ends(tier)[-1])


def _ends(tier: Tier) -> list[int]:
    """The newest term; one that holds nothing yet stands for what it goes on from."""
    newest = max(tier.marks)
    before = (e for e in sorted(tier.continued, reverse=True) if e in tier.marks)
    holds = next((e for e in (newest, *before) if _reach(tier, e) >= 0), newest)
    return [newest] if holds == newest else [newest, holds]


def _reach(tier: Tier, term: int) -> int:
    """How far a term of its line goes and counts."""
    step = tier.marks[term].step
    return min(step, tier.continued.get(term, step))


def _knows(tier: Tier, term: int, other: Tier) -> bool:
    """Whether a tier knows a term of another one as far as that goes, or was told to pass it over."""
    there, here, step = other.marks[term], tier.marks.get(term), _reach(other, term)
    if any(part.behind < step <= part.step for part in tier.over.get(there.token, ())):
        return True
    if here is None or here.token != there.token:
        return False
    # the log that was gone on from may be removed since
    return step <= max(here.step, tier.continued.get(term, -1))
