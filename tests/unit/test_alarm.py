"""Trouble is told at once, again every few minutes, and when it is over; never at every step."""

from __future__ import annotations

from everystep.core.alarm import AGAIN_SECONDS, Alarm


def test_told_at_once_and_again_until_it_is_over() -> None:
    alarm, said = Alarm(), []
    for now in range(1000):
        problem = "the disk is full" if 100 <= now < 900 else ""
        if text := alarm.look(problem, float(now)):
            said.append((now, text))
    times = [now for now, _ in said]
    assert times == [100, 100 + AGAIN_SECONDS, 100 + 2 * AGAIN_SECONDS, 900]
    assert said[0][1] == "the disk is full" and "300 s" in said[1][1]
    assert said[-1][1] == "all is well again after 800 s"


def test_another_trouble_is_told_too_but_one_that_flickers_only_now_and_then() -> None:
    alarm = Alarm()
    assert alarm.look("a", 0.0) == "a"
    assert alarm.look("b", 1.0) == ""  # in a moment
    assert alarm.look("b", 11.0).startswith("b")
    flickering = Alarm()
    said = [flickering.look("a" if n % 2 else "", float(n)) for n in range(200)]
    assert [text for text in said if text] == ["a", "all is well again after 1 s"]


def test_silence_while_all_is_well() -> None:
    alarm = Alarm()
    assert not any(alarm.look("", float(now)) for now in range(10))
