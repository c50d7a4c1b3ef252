"""The engine of replay, on a target that only notes what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from everystep.core.events import (
    GRADIENT,
    Call,
    Edit,
    Event,
    Fingerprints,
    Rebase,
    Seal,
    SlotValues,
)
from everystep.errors import CorruptData
from everystep.replay.engine import Engine, Sent, plain_run, seal_of
from everystep.shadow.replica_state import ReplicaState

MOVED = {0, 1}


class Notes:
    """A target."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def write(self, edits: Iterable[tuple[Edit, str]]) -> None:
        self.told.append([(edit.atom, edit.slot, payload) for edit, payload in edits])

    def set_values(self, event: SlotValues) -> None:
        self.told.append(event.values)

    def replay_calls(self, calls: Sequence[tuple[Call, str]], base: Any = None) -> list[list[int]]:
        self.told.append((*(payload for _, payload in calls), base))
        return [[call.at] for call, _ in calls]

    def rebase(self, rebase: Rebase, sent: dict[int, Sent]) -> None:
        self.told.append(sent)

    def seal(self, seal: Seal, changed: set[int]) -> None:
        self.told.append((seal.step, changed))

    def compare(self, prints: Fingerprints, payload: str) -> None:
        self.told.append(("compare", payload))


def edit(atom: int, slot: str = "", start: int = 0) -> Edit:
    return Edit(atom, slot, "float32", (1,), start, 4, 0)


def call(moves: int) -> Call:
    return Call(0, b"", b"", moves, {})


def seal(step: int) -> Seal:
    return Seal(step, step - 1, b"", b"", (), 0)


PRINTS = Fingerprints((), 0)


def test_edits_that_follow_each_other_come_together_over_entries_too() -> None:
    target = Notes()
    Engine(target).apply([([edit(0)], "a"), ([edit(1), call(0), edit(2), seal(1)], "b")])
    first, (payload, base), last, sealed = target.told
    assert first == [(0, "", "a"), (1, "", "b")] and last == [(2, "", "b")]
    assert (payload, base) == ("b", None) and sealed == (1, {0, 1, 2})


def test_a_base_is_what_came_since_its_atoms_value() -> None:
    target = Notes()
    before = [edit(0, "/old"), SlotValues(0, 0, b"old"), edit(0), edit(0, start=4)]
    base = [edit(0, "/new"), SlotValues(0, 1, b"new"), Rebase((0, 1), (3, 3)), edit(1), seal(4)]
    Engine(target).apply([([*before, *base], "")])
    (sent,) = [told for told in target.told if isinstance(told, dict)]
    assert sent == {0: Sent({"/new"}, {1: b"new"}), 1: Sent()}
    assert target.told[-1] == (4, {1}), "its version is the rebase's, unless it changes after that"


def test_nothing_of_a_record_is_remembered_in_the_next() -> None:
    target = Notes()
    records = [edit(0), edit(0, "/m"), seal(1), Rebase((0,), (2,)), edit(1, GRADIENT), seal(2)]
    Engine(target).apply([(records, "")])
    assert target.told[1:] == [(1, {0}), {0: Sent()}, [(1, GRADIENT, "")], (2, set())]


class Failing(Notes):
    """A target that has no memory once."""

    def replay_calls(self, calls: Sequence[tuple[Call, str]], base: Any = None) -> list[list[int]]:
        if "begin" not in self.told:
            raise MemoryError
        return super().replay_calls(calls, base)


def test_nothing_of_a_record_that_failed_is_remembered_in_the_next() -> None:
    """Its fingerprints lie in a slot of the ring that another record has taken since."""
    state = ReplicaState.__new__(ReplicaState)
    state.replica = SimpleNamespace(complete=False)  # type: ignore[assignment]
    state.session = SimpleNamespace(step=0)  # type: ignore[assignment]
    state.tail = SimpleNamespace(split=lambda record: (record, []), atoms=())  # type: ignore[assignment]
    target = Failing()
    state._engine = Engine(target)  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        state.replay([([edit(7, "/m"), PRINTS, call(0), seal(1)], memoryview(b""))])
    target.told.append("begin")
    state.replay([([call(1), seal(2)], memoryview(b""))])
    assert target.told[-1] == (2, {1}), "no other atom, and nothing is compared"


def test_fingerprints_are_of_the_state_at_the_seal() -> None:
    target = Notes()
    Engine(target).apply([([PRINTS], "a"), ([edit(0), seal(1)], "b")])
    assert target.told == [[(0, "", "b")], (1, {0}), ("compare", "a")]


def test_calls_of_one_pass_come_first_and_then_record_by_record() -> None:
    target = Notes()
    records = [[([call(0), edit(5), seal(1)], "a")], [([edit(6)], "b"), ([call(1), seal(2)], "c")]]
    Engine(target).apply_together(records, "copy")
    assert target.told == [
        ("a", "c", "copy"),
        [(5, "", "a")],
        (1, {0, 5}),
        [(6, "", "b")],
        (2, {1, 6}),
    ]


@pytest.mark.parametrize(
    ("events", "plain"),
    [
        ([call(0), seal(1)], True),
        ([edit(5), call(0), PRINTS, seal(1)], True),
        ([seal(1)], False),
        ([call(0), call(0), seal(1)], False),
        ([edit(0), call(0), seal(1)], False),
        ([edit(5, "/slot"), call(0), seal(1)], False),
        ([edit(5, GRADIENT), call(0), seal(1)], False),
        ([SlotValues(0, 0, b""), call(0), seal(1)], False),
        ([Rebase((5,), (1,)), call(0), seal(1)], False),
    ],
)
def test_a_plain_record_is_a_call_and_what_it_does_not_touch(
    events: list[Event], plain: bool
) -> None:
    assert plain_run([[(events, "")]], MOVED, 8) == plain


def test_a_run_ends_where_something_else_has_to_happen() -> None:
    plain, printed = [([call(0), seal(1)], "")], [([call(0), PRINTS, seal(1)], "")]
    assert plain_run([plain] * 9, MOVED, 8) == 8
    assert plain_run([plain, printed, plain], MOVED, 8) == 2, "compared before anything moves on"
    assert plain_run([plain, [([seal(1)], "")], plain], MOVED, 8) == 1


def test_a_record_ends_with_a_seal() -> None:
    assert seal_of([([edit(0)], ""), ([seal(3)], "")]).step == 3
    with pytest.raises(CorruptData, match="its last event is a Edit, no seal"):
        seal_of([([edit(0)], "")])
