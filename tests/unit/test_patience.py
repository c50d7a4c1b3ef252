"""How long a step that is to be durable is waited for."""

from __future__ import annotations

from everystep.core.patience import (
    STILL_SECONDS,
    TELL_AGAIN_SECONDS,
    TELL_SECONDS,
    Patience,
    Wait,
)
from everystep.waiting import _sign


def test_as_long_as_it_goes_on_it_is_waited_for_and_told_now_and_then() -> None:
    patience = Patience(0.0)
    verdicts = [patience.look(("bytes", now), now) for now in range(1, 3601)]
    assert Wait.OVER not in verdicts
    told = [now for now, verdict in enumerate(verdicts, 1) if verdict is Wait.TELL]
    assert told[:2] == [TELL_SECONDS, TELL_SECONDS + TELL_AGAIN_SECONDS]


def test_what_stands_still_is_given_up() -> None:
    patience = Patience(0.0)
    assert patience.look("a", 5.0) is Wait.ON
    assert patience.look("a", 5.0 + STILL_SECONDS) is not Wait.OVER
    assert patience.look("b", 6.0 + STILL_SECONDS) is not Wait.OVER, "it had moved"
    assert patience.look("b", 7.0 + 2 * STILL_SECONDS) is Wait.OVER
    assert patience.still(7.0 + 2 * STILL_SECONDS) == STILL_SECONDS + 1


def test_who_does_not_say_how_far_it_is_does_not_move() -> None:
    patience = Patience(0.0, 10.0)
    assert [patience.look(None, now) for now in (1.0, 9.0, 10.5)] == [Wait.ON, Wait.ON, Wait.OVER]


def test_a_shadow_that_reads_a_base_back_or_removes_files_gets_on() -> None:
    status = {"durable_step": 3, "store_operations": 7}
    assert _sign(status) == _sign(dict(status))
    assert _sign(status) != _sign({**status, "store_operations": 8})
