"""When a trainer that lost its shadow tries again."""

from __future__ import annotations

from everystep.core.outage import Outage


def test_pauses_grow_until_recording_goes_on() -> None:
    outage, now = Outage(), 100.0
    assert outage.may_retry(now) and outage.problem == ""
    pauses = []
    for _ in range(12):
        outage.begin("the shadow is gone", now)
        pauses.append(next(s for s in (0.5 * 2**i for i in range(12)) if outage.may_retry(now + s)))
        assert not outage.may_retry(now) and outage.problem == "the shadow is gone"
    assert pauses[:4] == [0.5, 1, 2, 4] and pauses[-1] == 64  # a minute at most
    outage.end()
    assert outage.problem == ""
    outage.begin("again", now)
    assert outage.may_retry(now + 0.5)


def test_a_shadow_that_died_is_replaced_at_once() -> None:
    outage = Outage()
    outage.begin("first", 100.0)
    outage.begin("second", 100.0, at_once=True)
    assert outage.may_retry(100.0)


def test_what_is_over_for_good_is_never_tried_again() -> None:
    outage = Outage()
    outage.last("another trainer holds the run")
    assert outage.is_final and not outage.may_retry(1e12)
