"""The loop of `run.steps`, and how it was left: a finished turn is sealed, a broken one is taken back."""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Iterator
from enum import StrEnum
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple, Protocol

# what the interpreter executes when `break` or `return` gives a loop's iterator up
_BREAKS = frozenset({"POP_TOP", "POP_ITER", "END_FOR"})


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

    def resume(self) -> None:
        """A loop begins, and the turn before may not have ended."""


class _FramePosition(NamedTuple):
    """Where a frame stands."""

    code: CodeType
    last: int  # f_lasti

    @property
    def at(self) -> int:
        """The last instruction. 3.12 points behind it while a generator runs in a FOR_ITER."""
        at, code = self.last, self.code.co_code
        while at and dis.opname[code[at]] == "CACHE":
            at -= 2
        return at

    @property
    def instruction(self) -> str:
        return dis.opname[self.code.co_code[self.at]]

    @property
    def end(self) -> int:
        """Of the body of the loop that this is the head of; 0 if it is none."""
        found = (i for i in dis.get_instructions(self.code) if i.offset == self.at)
        return next((int(i.argval) for i in found if i.opname == "FOR_ITER"), 0)


class Steps:
    """Not a generator: when it is given up, `break` and an exception must be told apart."""

    def __init__(self, run: Loop, total: int) -> None:
        self._run = run
        self._total = total
        self._current = False  # whether the open turn is ours
        self._began: dict[int, _FramePosition] = {}  # where each frame stood when the turn began

    def __iter__(self) -> Iterator[int]:
        if self._current and self._run.turn is Turn.OPEN:  # kept, and left nobody knows how
            self._run.resume()
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
        self._began = _stands(sys._getframe(1))
        return run.step

    def __del__(self) -> None:
        if self._current and self._run.turn is Turn.OPEN:
            self._run.turn = Turn.FINISHED if _left(self._began, _caller()) else Turn.BROKEN

    def is_running(self) -> bool:
        """Whether whoever asks is called from the body of the loop. One that keeps its iterator may have been
        left by an exception, and nobody would see that."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            head = self._began.get(id(frame))
            now = _FramePosition(frame.f_code, frame.f_lasti)
            if head is not None and head.code is now.code and head.at < now.at < head.end:
                return True
            frame = frame.f_back
        return False


def _stands(frame: FrameType | None) -> dict[int, _FramePosition]:
    """Of all frames that wait for a turn: the loop of a user may ask for it through others (tqdm)."""
    stands = {}
    while frame is not None:
        stands[id(frame)] = _FramePosition(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return stands


def _caller() -> FrameType | None:
    """Of who called us; None at the end of the interpreter, which drops what is left."""
    try:
        return sys._getframe(2)
    except ValueError:
        return None


def _left(began: dict[int, _FramePosition], frame: FrameType | None) -> bool:
    """Whether the frame that dropped an iterator has left its loop in the ordinary way. What cannot be told
    counts as broken."""
    head = began.get(id(frame))
    if frame is None or head is None or head.instruction != "FOR_ITER":
        return False  # not a frame whose `for` has asked for the turn
    now = _FramePosition(frame.f_code, frame.f_lasti)
    if now.code is not head.code:
        return False  # another frame, in the place of one that has ended
    # where an exception unwinds the stack, we see the instruction that raised it
    if now.at == head.at:  # islice and zip end here; map may have raised in the midst of a turn
        return not _raised_here(frame)
    return now.instruction in _BREAKS  # not the FOR_ITER of an inner loop, which can raise


def _raised_here(frame: FrameType) -> bool:
    """Slow: a search through all objects, for the traceback that an exception has before it unwinds."""
    return any(
        isinstance(found, TracebackType) and found.tb_lasti == frame.f_lasti
        for found in gc.get_referrers(frame)
    )
