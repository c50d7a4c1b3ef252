"""The loop of `run.steps`, and how it was left: a finished turn is sealed, a broken one is taken back."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from enum import StrEnum
from types import FrameType
from typing import Protocol

# what the interpreter executes when a `for` loop gives its iterator up in the ordinary way; FOR_ITER, where
# another iterator (islice, zip) has held it. If that one raised, its new turn has done nothing yet.
_BREAKS = frozenset({"POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER"})


class Turn(StrEnum):
    """The turn of a loop that has begun last."""

    SEALED = "sealed"  # or none has begun
    OPEN = "open"  # the loop runs
    FINISHED = "finished"  # left by `break` or `return`
    BROKEN = "broken"  # left by an exception, or nobody can tell


class Loop(Protocol):
    """What the iterator needs of a run."""

    turn: Turn

    @property
    def step(self) -> int: ...

    def next_turn(self) -> None:
        """Seal the turn that has ended."""


class Steps:
    """Not a generator: when it is given up, `break` and an exception must be told apart."""

    def __init__(self, run: Loop, total: int) -> None:
        self._run = run
        self._total = total
        self._current = False  # whether the open turn is ours

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        run = self._run
        try:
            run.next_turn()
        except BaseException:  # Ctrl-C in the midst of a seal: nobody knows how far it came
            run.turn = Turn.BROKEN
            raise
        self._current = run.step < self._total
        run.turn = Turn.OPEN if self._current else Turn.SEALED
        if not self._current:
            raise StopIteration
        return run.step

    def __del__(self) -> None:
        if self._current and self._run.turn is Turn.OPEN:
            self._run.turn = Turn.FINISHED if _left_by_break(_caller()) else Turn.BROKEN


def _caller() -> FrameType | None:
    """Of who called us; None at the end of the interpreter, which drops what is left."""
    try:
        return sys._getframe(2)
    except ValueError:
        return None


def _left_by_break(frame: FrameType | None) -> bool:
    """Whether the frame that dropped an iterator was popping it off its stack. Where an exception unwinds the
    stack, the last instruction is the one that raised, which popping never does."""
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] in _BREAKS
