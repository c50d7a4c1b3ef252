"""What the demo makes of its trainers' logs."""

from __future__ import annotations

import pytest

from everystep.bench.demo import _difference, _more_percent, _paces
from everystep.bench.demo_trainer import Line


def log_of(paces: list[float], *, turn: int = 4, idle: float = 100.0) -> list[Line]:
    """Turns of a training whose steps take so long; between two of them it waits."""
    lines, now, step = [], 0.0, 0
    for pace in paces:
        lines.append(Line("wait", step, now))
        now += idle
        lines.append(Line("go", step, now))
        for _ in range(turn):
            now += pace
            lines.append(Line("step", step, now, loss=float(step).hex()))
            step += 1
    return [*lines, Line("wait", step, now), Line("end", step, now + 5, digest="d")]


def test_waiting_and_the_first_turn_do_not_count() -> None:
    assert _paces(log_of([9.0, 1.0, 2.0])) == pytest.approx([1.0, 2.0])


def test_a_machine_that_changes_its_pace_changes_it_for_all() -> None:
    paces = [9.0, 1.0, 2.0, 1.5, 3.0]
    ours = log_of([1.1 * pace for pace in paces])
    assert _more_percent(ours, log_of(paces)) == pytest.approx(10)
    both = log_of([0.9 * p for p in paces]), log_of([1.1 * p for p in paces])
    assert _more_percent(ours, *both) == pytest.approx(10)


def test_a_bit_that_differs_is_told() -> None:
    one = log_of([1.0, 1.0])
    assert _difference(one, log_of([2.0, 2.0])) == ""
    other = [
        Line("step", 3, 0.0, loss="0x1p0") if line.step == 3 and line.kind == "step" else line
        for line in one
    ]
    assert "loss of step 3" in _difference(one, other)
    assert "were not done" in _difference(one, one[:4])
    assert "final weights" in _difference(one, [*one[:-1], Line("end", 8, 0.0, digest="e")])
