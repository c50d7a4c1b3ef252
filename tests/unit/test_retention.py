"""The rules of retention, as a pure function: against what each of them promises, whatever the bases are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.core.retention import BaseFacts, Rules, judge, log_begins_at, rules_of
from everystep.environment import resolve
from everystep.errors import OptionsError
from everystep.options import Keep, Options

HOUR = 3600.0
counts = st.integers(0, 4)
best = st.builds("{} {}".format, st.integers(1, 3), st.sampled_from(["lowest", "highest"]))
rules = st.builds(
    Rules,
    keep_last=st.integers(1, 4),
    keep_every=st.sampled_from([0, 1, 7, 50]),
    keep_hourly=counts,
    keep_daily=counts,
    keep_best=st.one_of(st.just(""), best),
    keep_slots=counts,
)
metrics = st.one_of(st.none(), st.sampled_from([-1.0, 0.5, 0.5, 2.0]), st.floats(-9, 9))
tags = st.sampled_from([(), (), (), ("a",), ("b", "c")])


@st.composite
def histories(draw: st.DrawFn) -> list[BaseFacts]:
    """Bases newest first, their steps and times ascending as they were made."""
    found, step, time = [], 0, 1e9
    for _ in range(draw(st.integers(1, 25))):
        step += draw(st.integers(1, 40))
        time += draw(st.floats(1, 12 * HOUR))
        found.append(BaseFacts(step, time, draw(metrics), draw(tags)))
    return found[::-1]


def kept(bases: list[BaseFacts], rules: Rules, verified: int | None = 0) -> list[BaseFacts]:
    verdicts = judge(bases, rules, verified)
    return [base for base, verdict in zip(bases, verdicts, strict=True) if verdict.stays]


@given(histories(), rules)
def test_what_recovery_needs_and_what_is_pinned_stays(bases: list[BaseFacts], rules: Rules) -> None:
    stays = kept(bases, rules)
    assert stays[: rules.keep_last] == bases[: rules.keep_last]
    assert {b for b in bases if b.tags} <= set(stays)
    begin = log_begins_at(bases, rules, 0)
    assert begin in {base.step for base in bases[: rules.keep_last]}


@given(histories(), rules, st.data())
def test_nothing_goes_before_something_newer_is_verified(
    bases: list[BaseFacts], rules: Rules, data: st.DataObject
) -> None:
    assert kept(bases, rules, None) == bases
    assert log_begins_at(bases, rules, None) == bases[-1].step
    verified = data.draw(st.integers(0, len(bases) - 1))
    stays = kept(bases, rules, verified)
    assert stays[: verified + 1] == bases[: verified + 1]
    assert stays[verified:] == kept(bases[verified:], rules)
    assert log_begins_at(bases, rules, verified) <= bases[verified].step


@given(histories(), rules)
def test_every_rule_keeps_its_own(bases: list[BaseFacts], rules: Rules) -> None:
    stays = set(kept(bases, rules))
    if rules.keep_every:
        windows = {base.step // rules.keep_every: base for base in bases}
        assert set(windows.values()) <= stays
    for count, period in ((rules.keep_hourly, HOUR), (rules.keep_daily, 24 * HOUR)):
        first = {base.time // period: base for base in bases}
        newest = sorted(first, reverse=True)[:count]
        assert {first[when] for when in newest} <= stays
    if rules.keep_best:
        count, word = int(rules.keep_best.split()[0]), rules.keep_best.split()[1]
        known = sorted({b.metric for b in bases if b.metric is not None}, reverse=word == "highest")
        assert set(known[:count]) <= {base.metric for base in stays}


@given(histories(), rules)
def test_few_stay(bases: list[BaseFacts], rules: Rules) -> None:
    most = rules.keep_last + rules.keep_hourly + rules.keep_daily + sum(bool(b.tags) for b in bases)
    most += int(rules.keep_best.split()[0]) if rules.keep_best else 0
    most += bases[0].step // rules.keep_every + 1 if rules.keep_every else 0
    assert len(kept(bases, rules)) <= most


@given(histories(), rules)
def test_pruning_on_the_way_is_pruning_at_the_end(bases: list[BaseFacts], rules: Rules) -> None:
    """What a rule will want later has not been removed meanwhile, and nothing is kept by mistake."""
    held: list[BaseFacts] = []
    for base in reversed(bases):
        held = kept([base, *held], rules)
    assert held == kept(bases, rules)


@given(st.integers(1, 40), counts, st.integers(0, 40), st.integers(-9, 9))
def test_a_clock_that_is_set_takes_no_hour_away(
    number: int, count: int, newer: int, jump: int
) -> None:
    """Three bases an hour; whatever hours were seen before it was set, those behind it keep their own."""
    bases = [
        BaseFacts(step, step * HOUR / 3 + jump * HOUR * (place < newer))
        for place, step in enumerate(range(number, 0, -1))
    ]
    stays = kept(bases, Rules(keep_last=1, keep_hourly=count))
    behind = [b.step for b in bases[:newer] if b.step % 3 == 0]  # the first of an hour
    assert set(behind[:count]) <= {b.step for b in stays}
    assert len(stays) <= 1 + count


@given(histories(), rules)
def test_slots_stay_with_the_last_and_with_tags(bases: list[BaseFacts], rules: Rules) -> None:
    for place, verdict in enumerate(judge(bases, rules, 0)):
        whole = not rules.keep_slots or place < rules.keep_slots or bool(bases[place].tags)
        assert verdict.with_slots is whole


def test_reasons_are_told() -> None:
    bases = [BaseFacts(30, 3e4, 0.1), BaseFacts(20, 2e4, 0.3, ("good",)), BaseFacts(10, 1e4, 0.2)]
    told = judge(bases, Rules(keep_last=1, keep_best="2 lowest"), 0)
    assert [verdict.reasons for verdict in told] == [
        ("last 1", "best 2 lowest"),
        ("tag good",),
        ("best 2 lowest",),
    ]


@pytest.mark.parametrize(
    "bad",
    [{"last": 0}, {"every": -1}, {"hourly": "x"}, {"daily": -2}, {"slots": -1},
     {"best": "3"}, {"best": "0 lowest"}, {"best": "lowest 3"}, {"best": 3}],
)  # fmt: skip
def test_options_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionsError, match=f"keep.{next(iter(bad))}"):
        Keep(**bad)


def test_options_become_rules() -> None:
    environment = {"EVERYSTEP_KEEP_BEST": "2 highest", "EVERYSTEP_KEEP_DAILY": "7"}
    given = rules_of(resolve({"keep": Keep(every=1000)}, environment))
    assert given == Rules(3, 1000, 0, 7, "2 highest", 0)
    assert rules_of(Options()) == Rules()
