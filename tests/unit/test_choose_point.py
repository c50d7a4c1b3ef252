"""Which point a resume takes, decided from steps alone."""

from __future__ import annotations

import pytest

from everystep.errors import NothingToRecover, StepUnavailable
from everystep.recover.choose import (
    log_until,
    missing_last_words,
    refuse_damaged,
    refuse_unknown_step,
    takes_shadows,
)


@pytest.mark.parametrize(
    ("in_shadow", "in_store", "wanted", "expected"),
    [
        (None, 5, None, False),
        (None, 5, 5, False),
        (7, None, None, True),
        (7, 7, None, True),
        (7, 8, None, False),  # others have gone on
        (7, 8, 7, True),
        (7, 5, 5, False),
    ],
)
def test_the_newer_point_is_taken(
    in_shadow: int | None, in_store: int | None, wanted: int | None, expected: bool
) -> None:
    assert takes_shadows(in_shadow, in_store, wanted) is expected


def test_a_log_that_lacks_residuals_is_not_read_by_who_wants_them() -> None:
    assert log_until(4, None, exact=True, lacking=True) == 4
    assert log_until(4, None, exact=True, lacking=False) is None
    assert log_until(4, 6, exact=False, lacking=True) == 6


def test_last_words_that_did_not_reach_the_store_are_told() -> None:
    assert missing_last_words("run", 7, 7, []) == []
    (told,) = missing_last_words("run", 3, 7, [])
    assert "held step 7 and left step 3" in told
    with pytest.raises(NothingToRecover, match=r"held step 7 and left nothing .*\(refused\)"):
        missing_last_words("run", None, 7, ["refused"])


def test_refusals_say_what_there_is() -> None:
    with pytest.raises(NothingToRecover, match=r"no step in it is whole; damaged: a, and 1 more"):
        refuse_damaged("run", ["a\nin detail", "b"])
    for logged, listed, told in (
        ({4}, {4}, "the log before it is damaged"),
        (set(), {4}, "only its weights are kept"),
        (set(), set(), "not kept"),
    ):
        with pytest.raises(StepUnavailable, match=told) as caught:
            refuse_unknown_step("run", 4, logged=logged, listed=listed, others="others")
        assert "others" in (caught.value.hint or "")
