"""The shadow's intake, fed by hand: reading ahead must never change what an earlier step looked like."""

from __future__ import annotations

import pytest
from rings import publish

from everystep.core.census import Atom, Census, Mode, OptimizerSpec
from everystep.core.events import Call, Edit, Event, Fingerprints, Rebase, Seal, SlotValues
from everystep.core.geometry import Geometry
from everystep.format import values
from everystep.format.base import SessionValues
from everystep.format.slot import FLAG_GAP, FLAG_SEALED
from everystep.lane.arena import SharedMemory
from everystep.lane.ring import RingReader, RingWriter
from everystep.shadow import replica_state
from everystep.shadow.intake import Intake
from everystep.shadow.replica import Replica

CENSUS = Census((Atom("running_mean", "float32", (2,), buffer=True),), (), "exact")
GEOMETRY = Geometry(slots=8, slot_bytes=4096)


class Bench:
    """A ring with both ends in one process."""

    def __init__(self, census: Census = CENSUS) -> None:
        memory = SharedMemory.create(GEOMETRY.bytes, "test")
        self.writer = RingWriter(memory, GEOMETRY, nonce=5)
        replica = Replica(census, None)
        replica.reserve_values()
        empty = SessionValues(0, b"", b"", (), ())
        self.intake = Intake(census, RingReader(memory, GEOMETRY), replica, empty)

    def publish(
        self, events: list[Event], payload: bytes = b"", flags: int = 0, step: int = 0
    ) -> None:
        publish(self.writer, events, payload, flags, step)

    def seal(self, step: int, after: int, *events: Event, payload: bytes = b"") -> None:
        seal = Seal(step, after, b"rng", b"", (), 0)
        self.publish([*events, seal], payload, FLAG_SEALED, step)

    @property
    def value(self) -> bytes:
        return bytes(self.intake.replica.view((0, "")))


def edit() -> Edit:
    return Edit(0, "", "float32", (2,), 0, 8, 0)


def test_an_edit_read_ahead_waits_for_the_base_before_it() -> None:
    bench = Bench()
    bench.seal(1, 0, edit(), Rebase((0,), (1,)), payload=b"state at")
    bench.seal(2, 1, edit(), payload=b"later on")
    assert bench.intake.take(may_apply=True)
    assert bench.intake.step == 1 and bench.intake.sealed_step == 2
    assert bench.value == b"state at", "the base of step 1 already shows step 2"
    assert bench.intake.take(may_apply=True)
    assert bench.intake.step == 2 and bench.value == b"later on"


def test_an_unsealed_record_changes_nothing() -> None:
    bench = Bench()
    bench.seal(1, 0, edit(), Rebase((0,), (1,)), payload=b"state at")
    bench.publish([edit()], b"not real", step=2)
    while bench.intake.take(may_apply=True):
        pass
    bench.intake.drop_unsealed()
    assert bench.intake.step == 1 and bench.value == b"state at"
    assert bench.writer.free == GEOMETRY.slots


def test_after_forgetting_every_slot_is_free_and_a_begun_record_is_skipped() -> None:
    bench = Bench()
    bench.seal(1, 0, edit(), Rebase((0,), (1,)), payload=b"state at")
    bench.publish([edit()], b"first pt", step=2)
    while bench.intake.take(may_apply=True):
        pass
    bench.intake.forget()
    assert bench.writer.free == GEOMETRY.slots
    assert bench.writer.requested_atoms() is None
    bench.seal(2, 1, Rebase((0,), (2,)))  # the end of the record that was given up
    bench.seal(3, 2, edit(), Rebase((0,), (3,)), payload=b"based ag")
    while bench.intake.take(may_apply=True):
        pass
    assert bench.intake.step == 3 and bench.intake.whole and bench.value == b"based ag"


def test_what_follows_a_record_at_which_a_listener_failed_is_not_skipped() -> None:
    """That one had come as a whole, and the next may bring the base that was asked for."""
    bench = Bench()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    bench.intake.on_record = fail
    bench.seal(1, 0, edit(), Rebase((0,), (1,)), payload=b"state at")
    with pytest.raises(ZeroDivisionError):
        bench.intake.take(may_apply=True)
    bench.intake.on_record = None
    bench.intake.forget()
    assert bench.writer.requested_atoms() is None
    bench.seal(2, 1, edit(), Rebase((0,), (2,)), payload=b"based ag")
    while bench.intake.take(may_apply=True):
        pass
    assert bench.intake.step == 2 and bench.intake.whole and bench.value == b"based ag"


def test_a_gap_is_told_and_the_next_base_counts() -> None:
    bench = Bench()
    bench.seal(1, 0, edit(), Rebase((0,), (1,)), payload=b"state at")
    bench.publish([], flags=FLAG_GAP)
    while bench.intake.take(may_apply=True):
        pass
    assert bench.intake.gap and bench.intake.whole, "what came before the gap is still whole"
    bench.intake.forget()
    assert not bench.intake.whole
    bench.seal(9, 8, edit(), Rebase((0,), (9,)), payload=b"based ag")
    while bench.intake.take(may_apply=True):
        pass
    assert bench.intake.step == 9 and bench.value == b"based ag"


def test_asking_for_a_shorter_log_does_not_take_back_a_repair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One request replaces the other, and the trainer may see only the last of them."""
    monkeypatch.setattr(replica_state, "_TAIL_BYTES_MIN", 0)
    spec = OptimizerSpec("", "muon:Muon", Mode.LOG, ((1,),))
    atoms = (Atom("rotten", "float32", (2,)), Atom("logged", "float32", (2,)))
    bench = Bench(Census(atoms, (spec,), "exact"))
    other = Edit(1, "", "float32", (2,), 0, 8, 0)
    bench.seal(1, 0, edit(), other, Rebase((0, 1), (1, 1)), payload=b"state at")
    bench.seal(2, 1, Fingerprints(((0, ""),), 0), payload=bytes(8))
    bench.seal(3, 2, Call(0, b"", b"\x01", 0, {}), payload=bytes(8))
    while bench.intake.take(may_apply=True):
        pass
    assert bench.intake.drifted == {0}
    assert bench.writer.requested_atoms() == [0, 1]


def test_of_a_tensor_that_is_sent_twice_the_later_bytes_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An edit before a step that could not be logged, and the state after it: nothing lies between them."""
    together: list[int] = []
    monkeypatch.setattr("everystep.shadow.replica.copy", lambda to, _: together.append(len(to)))
    bench = Bench()
    bench.seal(1, 0, edit(), edit(), Rebase((0,), (1,)), payload=b"state at")
    bench.seal(2, 1, edit(), edit(), payload=b"later on")
    while bench.intake.take(may_apply=True):
        pass
    assert bench.intake.step == 2 and max(together) == 1, "threads may copy them in any order"


def test_records_that_nobody_could_replay_are_not_logged() -> None:
    """While an atom has no base its gradients do not travel."""
    atoms = (Atom("first", "float32", (2,)), Atom("second", "float32", (2,)))
    bench, told = Bench(Census(atoms, (), "exact")), []
    bench.intake.on_record = lambda seal, entries: told.append(seal.step)
    other = Edit(1, "", "float32", (2,), 0, 8, 0)
    bench.seal(1, 0, edit(), Rebase((0,), (1,)), payload=b"state at")
    bench.seal(2, 1, edit(), payload=b"later on")
    bench.seal(3, 2, other, Rebase((1,), (3,)), payload=b"state at")
    bench.seal(4, 3, edit(), payload=b"later on")
    while bench.intake.take(may_apply=True):
        pass
    assert told == [3, 4]


def slot_edit(payload: bytes) -> Edit:
    return Edit(0, "/m", "uint8", (len(payload),), 0, len(payload), 0)


def test_a_slot_is_a_tensor_or_something_else_and_never_both() -> None:
    """Whatever came last counts, and a slot that changes its type at every step takes no new memory."""
    spec = OptimizerSpec("", "torch.optim:Adam", Mode.REPLAY, ((0,),))
    bench = Bench(Census((Atom("p", "float32", (2,)),), (spec,), "exact"))
    replica = bench.intake.replica
    bench.seal(1, 0, edit(), Rebase((0,), (1,)), payload=b"state at")
    assert bench.intake.take(may_apply=True)
    used = set()
    for step in range(2, 9, 2):
        number = SlotValues(0, 0, values.encode({"m": step, "n": None}, "slots"))
        bench.seal(step, step - 1, number)
        bench.seal(step + 1, step, slot_edit(b"tensor"), payload=b"tensor")
        assert bench.intake.take(may_apply=True)
        assert values.decode(replica.values[0, 0]) == {"m": step, "n": None}
        assert (0, "/m") not in replica.places
        assert bench.intake.take(may_apply=True)
        assert values.decode(replica.values[0, 0]) == {"n": None}
        assert bytes(replica.view((0, "/m"))) == b"tensor"
        used.add(replica.places[0, "/m"].place)
    assert len(used) == 1
