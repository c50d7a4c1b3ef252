"""How a loop over `run.steps` was left, as its iterator sees it."""

from __future__ import annotations

import contextlib
import itertools
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

    def resume(self) -> None:
        self.turn = Turn.SEALED  # taken back

    def steps(self, total: int) -> Steps:
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


def through_islice(run: Counter) -> None:
    for _ in itertools.islice(run.steps(3), 2):
        pass


def through_enumerate(run: Counter) -> None:
    for _, step in enumerate(run.steps(3)):
        if step == 1:
            break


def through_zip_that_ends(run: Counter) -> None:
    for _ in zip("ab", run.steps(3), strict=False):
        pass


class Bar:
    """As tqdm: a generator, and an object that keeps the iterator."""

    def __init__(self, steps: Iterator[int]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        steps = self.steps
        try:
            for step in steps:  # noqa: UP028
                yield step
        finally:
            self.steps = steps


def with_break_out_of_a_bar(run: Counter) -> None:
    for step in Bar(run.steps(3)):
        if step == 1:
            break


def with_an_end_of_islice_over_a_bar(run: Counter) -> None:
    for _ in itertools.islice(Bar(run.steps(3)), 2):
        pass


def with_break_behind_inner_loops(run: Counter) -> None:
    for step in run.steps(3):
        assert sum(x for x in range(3)) == 3
        for _ in range(2):
            pass
        try:
            with contextlib.suppress(ValueError):
                for _ in "ab":
                    if step == 1:
                        break
            if step == 1:
                break
        finally:
            assert [x + 1 for x in range(2)] == [1, 2]


def with_return_from_an_inner_loop(run: Counter) -> int:
    for step in run.steps(3):
        for other in range(3):
            if step == 1 and other == 1:
                return other
    return 0


def breaking(run: Counter) -> Iterator[int]:
    for step in run.steps(3):
        yield step
        if step == 1:
            break


def with_break_in_a_generator(run: Counter) -> None:
    for _ in breaking(run):
        pass


def in_a_comprehension(run: Counter) -> list[int]:
    return [step + 1 for step in itertools.islice(run.steps(3), 2)]


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


def fails(at: int = 1) -> Iterator[int]:
    """As a loader whose worker dies."""
    for number in range(3):
        if number == at:
            raise KeyError
        yield number


class Fails:
    """The same, not a generator."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        raise KeyboardInterrupt


def by_an_inner_iterator(run: Counter) -> None:
    for step in run.steps(3):
        for _ in fails(2 - step):
            if step == 0:
                break


def by_an_inner_iterator_at_once(run: Counter) -> None:
    for step in run.steps(3):
        for _ in Fails() if step == 1 else "ab":
            pass


def by_an_inner_iterator_in_a_with(run: Counter) -> None:
    with contextlib.suppress(KeyError):
        for step in run.steps(3):
            with contextlib.suppress(ValueError):
                for _ in fails() if step == 1 else "ab":
                    pass


def by_the_innermost_iterator(run: Counter) -> None:
    for step in run.steps(3):
        for _ in range(2):
            for _ in fails() if step == 1 else "ab":
                pass


def by_an_inner_comprehension(run: Counter) -> None:
    for step in run.steps(3):
        assert [str(x) for x in (fails() if step == 1 else "ab")]


def by_an_inner_iterator_of_islice(run: Counter) -> None:
    for step in itertools.islice(run.steps(3), 2):
        for _ in fails() if step == 1 else "ab":
            pass


def by_an_inner_iterator_of_a_bar(run: Counter) -> None:
    for step in Bar(run.steps(3)):
        for _ in fails() if step == 1 else "ab":
            pass


def by_an_inner_iterator_in_a_nested_function(run: Counter) -> None:
    def train() -> None:
        by_an_inner_iterator(run)

    for _ in range(2):
        train()


def failing(run: Counter) -> Iterator[int]:
    for step in run.steps(3):
        for _ in fails() if step == 1 else "ab":
            yield step


def by_an_inner_iterator_in_a_generator(run: Counter) -> None:
    for _ in failing(run):
        pass


def by_an_inner_iterator_with_an_outer_loop(run: Counter) -> None:
    for _ in range(2):
        for step in run.steps(3):
            for _ in fails() if step == 1 else "ab":
                pass


def body(step: int) -> int:
    return 1 // (1 - step)


def by_map(run: Counter) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in map(body, run.steps(3)):
            pass


def by_map_over_a_bar(run: Counter) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in map(body, Bar(run.steps(3))):
            pass


def trained(steps: Iterator[int]) -> Iterator[int]:
    for step in steps:
        yield body(step)


def by_a_generator_that_trains(run: Counter) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in trained(run.steps(3)):
            pass


def in_a_comprehension_by_exception(run: Counter) -> None:
    with contextlib.suppress(ZeroDivisionError):
        assert [body(step) for step in run.steps(3)]


def by_an_exception_that_kept_the_iterator(run: Counter) -> None:
    errors = [error_of(run)]
    errors.pop()


def error_of(run: Counter) -> Exception:
    steps = run.steps(3)
    try:
        for step in steps:
            body(step)
    except ZeroDivisionError as error:
        return error
    raise AssertionError


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
    (through_islice, Turn.FINISHED),
    (through_enumerate, Turn.FINISHED),
    (through_zip_that_ends, Turn.FINISHED),
    (with_break_out_of_a_bar, Turn.FINISHED),
    (with_an_end_of_islice_over_a_bar, Turn.FINISHED),
    (with_break_behind_inner_loops, Turn.FINISHED),
    (with_return_from_an_inner_loop, Turn.FINISHED),
    (with_break_in_a_generator, Turn.FINISHED),
    (in_a_comprehension, Turn.FINISHED),
    (by_exception, Turn.BROKEN),
    (by_interrupt, Turn.BROKEN),
    (by_exception_from_below, Turn.BROKEN),
    (by_exception_that_is_caught, Turn.BROKEN),
    (by_an_inner_iterator, Turn.BROKEN),
    (by_an_inner_iterator_at_once, Turn.BROKEN),
    (by_an_inner_iterator_in_a_with, Turn.BROKEN),
    (by_the_innermost_iterator, Turn.BROKEN),
    (by_an_inner_comprehension, Turn.BROKEN),
    (by_an_inner_iterator_of_islice, Turn.BROKEN),
    (by_an_inner_iterator_of_a_bar, Turn.BROKEN),
    (by_an_inner_iterator_in_a_nested_function, Turn.BROKEN),
    (by_an_inner_iterator_in_a_generator, Turn.BROKEN),
    (by_an_inner_iterator_with_an_outer_loop, Turn.BROKEN),
    (by_map, Turn.BROKEN),
    (by_map_over_a_bar, Turn.BROKEN),
    (by_a_generator_that_trains, Turn.BROKEN),
    (in_a_comprehension_by_exception, Turn.BROKEN),
    (by_an_exception_that_kept_the_iterator, Turn.BROKEN),
    (in_a_generator, Turn.BROKEN),  # nobody can tell
]


@pytest.mark.parametrize(("loop", "expected"), LEFT, ids=[loop.__name__ for loop, _ in LEFT])
def test_how_a_loop_was_left(loop: Callable[[Counter], Any], expected: Turn) -> None:
    for _ in range(30):  # the interpreter specialises what runs often
        run = Counter()
        with contextlib.suppress(KeyError, KeyboardInterrupt, ValueError):
            loop(run)
        assert run.turn is expected
        assert run.sealed == ([0, 1, 2] if expected is Turn.SEALED else [0])


def test_the_turn_of_an_iterator_that_is_kept_is_done_again() -> None:
    """Nobody can tell how its loop was left."""
    run = Counter()
    steps = run.steps(3)
    for _ in steps:
        break
    assert run.turn is Turn.OPEN and list(steps) == [0, 1, 2]
    assert run.sealed == [0, 1, 2]


def test_who_is_called_from_the_body_of_a_loop() -> None:
    run = Counter()
    steps, seen = run.steps(2), []
    for _ in steps:
        seen.append(steps.is_running())
        seen += [steps.is_running() for _ in range(1)]
    seen += [steps.is_running(), (lambda: steps.is_running())()]
    assert seen == [True] * 4 + [False] * 2


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
