"""Which bases stay. A rule keeps the first base of every period, so what is kept now is kept later, however
often the rules are applied in between."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from everystep.option_values import best_of
from everystep.options import Options

_HOUR_SECONDS, _DAY_SECONDS = 3600, 86400


class Rules(msgspec.Struct, frozen=True):
    """The option `keep`, as it travels to the shadow and into the manifest."""

    keep_last: int = 3
    keep_every: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_best: str = ""
    keep_slots: int = 0


def rules_of(options: Options) -> Rules:
    kept = msgspec.structs.asdict(options.keep)
    return Rules(**{f"keep_{name}": value for name, value in kept.items()})


class BaseFacts(NamedTuple):
    """What the rules look at."""

    step: int
    time: float
    metric: float | None = None
    tags: tuple[str, ...] = ()


class Verdict(NamedTuple):
    reasons: tuple[str, ...]  # why it stays; none: it goes
    with_slots: bool = True  # False: only its weights stay

    @property
    def stays(self) -> bool:
        return bool(self.reasons)


def judge(bases: Sequence[BaseFacts], rules: Rules, verified: int | None) -> list[Verdict]:
    """A verdict for every base, newest first. `verified` is the place of the newest one whose bytes are known
    to be right: only what is older may go, and if there is none, nothing may."""
    if verified is None:
        return [Verdict(("no base is verified",)) for _ in bases]
    reasons: list[list[str]] = [[] for _ in bases]
    for place in range(verified):
        reasons[place].append("newer than the newest verified base")
    for place in range(verified, len(bases))[: rules.keep_last]:
        reasons[place].append(f"last {rules.keep_last}")
    for words, places in _periods(bases[verified:], rules):
        for place in places:
            reasons[verified + place].append(words)
    for why, base in zip(reasons, bases, strict=True):
        why += [f"tag {tag}" for tag in base.tags]
    whole = verified + rules.keep_slots if rules.keep_slots else len(bases)
    return [
        Verdict(tuple(why), with_slots=place < whole or bool(bases[place].tags))
        for place, why in enumerate(reasons)
    ]


def log_begins_at(bases: Sequence[BaseFacts], rules: Rules, verified: int | None) -> int:
    """The log is kept behind the last bases, not behind those that other rules keep."""
    if verified is None:
        return min(base.step for base in bases)
    last = min(rules.keep_last, rules.keep_slots or rules.keep_last)
    return min(base.step for base in bases[: verified + last])


def _periods(bases: Sequence[BaseFacts], rules: Rules) -> Iterable[tuple[str, list[int]]]:
    if rules.keep_every:
        steps = _first_of_each([base.step // rules.keep_every for base in bases])
        yield f"every {rules.keep_every} steps", steps
    for words, count, seconds in (
        ("hourly", rules.keep_hourly, _HOUR_SECONDS),
        ("daily", rules.keep_daily, _DAY_SECONDS),
    ):
        if count:
            yield words, _first_of_each([int(base.time // seconds) for base in bases])[:count]
    if rules.keep_best:
        count, lowest = best_of(rules.keep_best)
        # a base has what was reported last, so several have the same: the first of them counts
        first = {base.metric: place for place, base in enumerate(bases) if base.metric is not None}
        ranked = sorted(first, reverse=not lowest)
        yield f"best {rules.keep_best}", [first[metric] for metric in ranked[:count]]


def _first_of_each(periods: Sequence[Hashable]) -> list[int]:
    """The place of the oldest base in every period, newest period first; bases come newest first. A period
    that comes again, because the clock was set back, is another one."""
    older = [*periods[1:], None]
    return [place for place, period in enumerate(periods) if period != older[place]]
