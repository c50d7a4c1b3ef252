"""What a base cost is told by the steps around it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.bench.slowdown import measured_slowdown, seconds_lost


@given(st.integers(1, 5), st.floats(0.5, 2.0), st.floats(-0.01, 0.01))
def test_a_drifting_machine_is_no_cost(count: int, step: float, drift: float) -> None:
    """Steps become longer or shorter all the time; those beside a base take a tenth of a step more."""
    seconds = [step * (1 + drift * n) for n in range(60)]
    busy = range(30, 30 + count)
    for n in busy:
        seconds[n] += 0.1 * step
    began = sum(seconds[: busy[0]]) + 0.01 * step
    spans = [(began, sum(seconds[: busy[-1] + 1]) - 0.01 * step)]
    (lost,) = seconds_lost(seconds, sum(seconds), spans)
    assert lost == pytest.approx(0.1 * step * count, rel=0.05)


def test_bases_outside_of_the_window_and_windows_without_quiet_steps() -> None:
    assert seconds_lost([1.0] * 5, 100.0, [(0.0, 94.0), (101.0, 103.0)]) == []
    assert seconds_lost([1.0] * 5, 100.0, [(94.0, 101.0)]) == []


def test_a_share_of_what_training_would_have_taken() -> None:
    found = measured_slowdown([1.0, 3.0], 104.0)
    assert found.percent == pytest.approx(4.0)
    assert found.standard_error == pytest.approx(2.0)
    assert measured_slowdown([1.0], 101.0).standard_error == math.inf
