"""How much recording costs is told once, and only when it lasts."""

from __future__ import annotations

from everystep.core.slowdown import Slowdown


def run(meter: Slowdown, steps: int, seconds: float, lost: float, at: float = 0.0) -> list[str]:
    said = []
    for step in range(steps):
        meter.sealed(at + step * seconds, step * lost)
        if text := meter.warning():
            said.append(text)
    return said


def test_told_once_when_it_is_above_the_budget() -> None:
    meter = Slowdown(0.5)
    said = run(meter, 500, seconds=0.1, lost=0.002)
    assert len(said) == 1 and "2.0 %" in said[0] and "overhead_budget_percent=0.5" in said[0]
    assert abs((meter.percent or 0.0) - 100 * 0.002 / 0.098) < 1e-6


def test_silent_within_the_budget_and_before_enough_was_seen() -> None:
    assert run(Slowdown(0.5), 500, seconds=0.1, lost=0.0004) == []
    short = Slowdown(0.5)
    assert run(short, 60, seconds=0.1, lost=0.05) == [] and short.percent is None


def test_one_slow_moment_is_no_slowdown() -> None:
    meter, lost, said = Slowdown(0.5), 0.0, []
    for step in range(400):
        lost += 1.0 if step == 200 else 0.0
        meter.sealed(step * 0.1, lost)
        said.append(meter.warning())
    assert not any(said)


def test_steps_beside_a_base_do_not_count() -> None:
    meter = Slowdown(0.5)
    for step in range(400):
        if step % 40 < 20:
            meter.skip()
        else:
            meter.sealed(step * 0.1, step * 0.05)
    assert meter.percent is None
