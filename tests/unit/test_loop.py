"""How a loop over `run.steps` was left, as its iterator sees it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from everystep.loop import Steps, Turn


@dataclass
class Counter:
    turn: Turn = Turn.SEALED
    step: int = 0
    sealed: list[int] = field(default_factory=list)

    def next_turn(self) -> None:
        if self.turn is not Turn.SEALED:
            self.sealed.append(self.step)
            self.step += 1

    def steps(self, total: int) -> Iterator[int]:
        return Steps(self, total)


def to_the_end(run: Counter) -> None:
    for _ in run.steps(3):
        pass


def with_break(run: Counter) -> None:
    for step in run.steps(3):
        if step == 1:
            break


def with_break_from_within(run: Counter) -> None:
    for step in run.steps(3):
        for other in range(9):
            if other == 2:
                break
        if step == 1:
            with contextlib.suppress(ValueError):
                break


def with_return(run: Counter) -> Any:
    for step in run.steps(3):
        if step == 1:
            return [step]
    return None


def through_zip(run: Counter) -> None:
    for step, _ in zip(run.steps(3), "abc", strict=True):
        if step == 1:
            break


def by_exception(run: Counter) -> None:
    for step in run.steps(3):
        if step == 1:
            raise KeyError


def by_interrupt(run: Counter) -> None:
    for step in run.steps(3):
        if step == 1:
            raise KeyboardInterrupt


def by_exception_from_below(run: Counter) -> None:
    for step in run.steps(3):
        if step == 1:
            int("x" * step)


def by_exception_that_is_caught(run: Counter) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for step in run.steps(3):
            1 // (1 - step)


def generator(run: Counter) -> Iterator[int]:
    yield from run.steps(3)


def in_a_generator(run: Counter) -> None:
    for step in generator(run):
        if step == 1:
            break


LEFT: list[tuple[Callable[[Counter], Any], Turn]] = [
    (to_the_end, Turn.SEALED),
    (with_break, Turn.FINISHED),
    (with_break_from_within, Turn.FINISHED),
    (with_return, Turn.FINISHED),
    (through_zip, Turn.FINISHED),
    (by_exception, Turn.BROKEN),
    (by_interrupt, Turn.BROKEN),
    (by_exception_from_below, Turn.BROKEN),
    (by_exception_that_is_caught, Turn.BROKEN),
    (in_a_generator, Turn.BROKEN),  # nobody can tell
]


@pytest.mark.parametrize(("loop", "expected"), LEFT, ids=[loop.__name__ for loop, _ in LEFT])
def test_how_a_loop_was_left(loop: Callable[[Counter], Any], expected: Turn) -> None:
    run = Counter()
    with contextlib.suppress(KeyError, KeyboardInterrupt, ValueError):
        loop(run)
    assert run.turn is expected
    assert run.sealed == ([0, 1, 2] if expected is Turn.SEALED else [0])


def test_an_iterator_that_is_kept_goes_on() -> None:
    run = Counter()
    steps = run.steps(3)
    for _ in steps:
        break
    assert run.turn is Turn.OPEN and list(steps) == [1, 2]
    assert run.sealed == [0, 1, 2]


class Interrupted(Counter):
    def next_turn(self) -> None:
        super().next_turn()
        if self.step == 1:  # Ctrl-C in the midst of a seal
            raise KeyboardInterrupt


def test_a_seal_that_was_interrupted_is_not_a_finished_turn() -> None:
    run = Interrupted()
    with contextlib.suppress(KeyboardInterrupt):
        for _ in run.steps(3):
            pass
    assert run.turn is Turn.BROKEN


def test_what_the_interpreter_drops_at_its_end_is_broken_and_nothing_is_said() -> None:
    script = (
        "from everystep.loop import Steps, Turn\n"
        "class Run:\n"
        "    turn, step = Turn.SEALED, 0\n"
        "    def next_turn(self): pass\n"
        "    def __setattr__(self, name, value):\n"
        "        object.__setattr__(self, name, value); print(name, str(value), flush=True)\n"
        "steps = Steps(Run(), 3)\n"
        "next(steps)\n"
    )
    words = [sys.executable, "-c", script]
    told = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert told.stderr == ""
    assert told.stdout.split() == ["turn", "open", "turn", "broken"]
