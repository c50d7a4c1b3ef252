"""Whether gradients that a seal finds belong to a later step. Decided from what the loop did so far."""

from __future__ import annotations

from enum import StrEnum


class Habit(StrEnum):
    """What a training loop does with the gradients of a turn, as seen from one seal to the next."""

    UNKNOWN = "unknown"
    DISCARDS = "discards"  # they are gone before the next turn makes new ones
    KEEPS = "keeps"  # the next turn adds to them, or writes zeros into them: nobody can tell which


def learn(habit: Habit, *, known: bool, survived: bool) -> Habit:
    """`survived`: gradient objects of the last seal are still there. A loop that does so may do it again."""
    if survived:
        return Habit.KEEPS
    return Habit.DISCARDS if habit is Habit.UNKNOWN and known else habit


def carries_over(habit: Habit, *, called: bool) -> bool:
    """Whether pending gradients count for the next turn. Without a call in this turn they wait for one. After
    a call they count unless the loop is known to discard them."""
    return not called or habit is not Habit.DISCARDS
