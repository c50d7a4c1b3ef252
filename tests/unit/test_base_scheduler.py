"""What the scheduler of bases writes, and when: while a copy is made, and of a replica that is given up."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rings import publish
from waiting import wait_until

from everystep.core.cadence import base_is_due
from everystep.core.census import Atom, Census, Mode, OptimizerSpec
from everystep.core.events import Call, Edit, Fingerprints, Rebase, Seal
from everystep.core.geometry import Geometry
from everystep.core.retention import Rules
from everystep.errors import StoreError
from everystep.format.base import Point, SessionValues
from everystep.format.slot import FLAG_GAP, FLAG_SEALED
from everystep.lane.arena import SharedMemory
from everystep.lane.memory import address_of
from everystep.lane.ring import RingReader, RingWriter
from everystep.options import Options
from everystep.shadow import copies
from everystep.shadow.base_scheduler import BaseScheduler
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.intake import Intake
from everystep.shadow.replica import Replica
from everystep.shadow.report import describe_store
from everystep.shadow.shipper import Shipper
from everystep.store import term
from everystep.store.runs import read_lineage

SPEC = OptimizerSpec("", "torch.optim.sgd:SGD", Mode.REPLAY, ((0,),))
CENSUS = Census((Atom("w", "float32", (2,)),), (SPEC,), "exact")
GEOMETRY = Geometry(slots=8, slot_bytes=4096)
EDIT = Edit(0, "", "float32", (2,), 0, 8, 0)


class Copies:
    """An advance whose passes could copy."""

    copies = True

    def calls(self, calls: Any, base: Any = None) -> list[list[int]]:
        if base is not None:
            base.aside()
        return [[0] for _ in calls]

    def slots_changed(self, atom: int) -> None: ...


class Bench:
    """A replica at step 1, and a store that has nothing of it."""

    def __init__(self, run: Path) -> None:
        memory = SharedMemory.create(GEOMETRY.bytes, "test")
        self.writer = RingWriter(memory, GEOMETRY, nonce=5)
        replica = Replica(CENSUS, None)
        replica.reserve_values()
        empty = SessionValues(0, b"", b"", (), ())
        self.intake = Intake(CENSUS, RingReader(memory, GEOMETRY), replica, empty)
        self.intake.state.advances[0] = Copies()
        self.base_writer = BaseWriter(run, None, Rules())
        self.base_scheduler = BaseScheduler(Options(durable_every=1), self.intake, self.base_writer)
        self.base_writer.claim()
        seal = Seal(1, 0, b"rng", b"", (), 0)
        publish(self.writer, [EDIT, Rebase((0,), (1,)), seal], b"state at", FLAG_SEALED, 1)
        assert self.intake.take(may_apply=True) and self.intake.whole

    def persist(self) -> None:
        self.base_scheduler.persist_if_due(asked=False, last_words=False, moving=True)

    def persist_until_wanted(self) -> None:
        until = time.monotonic() + 10
        while self.base_scheduler.wanted is None and time.monotonic() < until:
            self.persist()
            time.sleep(0.01)

    def call(self, step: int) -> None:
        events = [Call(0, b"", b"\x01", 0, {}), Seal(step, step - 1, b"rng", b"", (), 0)]
        publish(self.writer, events, bytes(8), FLAG_SEALED, step)


def test_a_copy_that_memory_is_refused_for_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "run")

    def refused(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(copies, "room_for", refused)
    bench.persist()
    assert bench.base_scheduler.wanted is None
    bench.base_writer.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [1]


class SlowRoom:
    """Memory for copies is made real only once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.made: list[tuple[int, int]] = []  # address and bytes

    def populate(self, address: int, size: int) -> int:
        self.made.append((address, size))
        self.may.wait(30)
        return 0


@pytest.fixture
def slow_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowRoom]:
    room = SlowRoom()
    monkeypatch.setattr(copies, "_SMALL_BYTES", 0)
    monkeypatch.setattr(copies, "populate", room.populate)
    yield room
    room.may.set()


def test_replay_goes_on_while_memory_for_a_copy_is_made(
    tmp_path: Path, slow_room: SlowRoom
) -> None:
    bench = Bench(tmp_path / "run")
    base_scheduler, intake = bench.base_scheduler, bench.intake
    for _ in range(2):
        bench.persist()
        assert (
            base_scheduler.wanted is None
            and not base_scheduler.holds_still
            and not bench.base_writer.busy
        )
    now = time.monotonic_ns()
    assert bench.base_writer.spans.meet(now, now + 1), "it may slow training down"
    bench.call(step=2)
    assert intake.take(may_apply=True) and intake.step == 2
    slow_room.may.set()
    bench.persist_until_wanted()
    assert base_scheduler.wanted is not None and base_scheduler.wanted.snapshot.step == 2
    assert slow_room.made == [(address_of(base_scheduler.wanted.targets[0, ""]), 8)], (
        "it is what is filled"
    )
    bench.call(step=3)
    assert intake.take(may_apply=True, base=base_scheduler.wanted)
    base_scheduler.look_after_copy()
    bench.base_writer.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [2]


def test_who_asks_for_a_base_does_not_wait_for_memory(tmp_path: Path, slow_room: SlowRoom) -> None:
    bench = Bench(tmp_path / "run")
    bench.persist()
    bench.base_scheduler.persist_if_due(asked=True, last_words=False, moving=True)
    bench.base_writer.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [1]
    now = time.monotonic_ns()
    assert not bench.base_writer.spans.meet(now, now + 1), "one base, one span"


def test_a_room_is_given_back_when_no_copy_is_needed(tmp_path: Path, slow_room: SlowRoom) -> None:
    """The trainer dies while it is made: the replica itself is written."""
    bench = Bench(tmp_path / "run")
    bench.persist()
    assert bench.base_scheduler._room is not None
    bench.base_scheduler.persist_if_due(asked=False, last_words=True, moving=False)
    bench.base_writer.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [1]
    assert bench.base_scheduler._room is None


def test_what_was_begun_is_written_although_it_is_no_longer_due(
    tmp_path: Path, slow_room: SlowRoom
) -> None:
    bench = Bench(tmp_path / "run")
    bench.persist()
    slow_room.may.set()
    bench.base_writer.state = msgspec.structs.replace(
        bench.base_writer.state, durable=Point(1, 0), durable_at=time.monotonic()
    )
    bench.base_scheduler.options = Options(durable_every=1000)
    bench.persist_until_wanted()
    assert bench.base_scheduler.wanted is not None


def test_a_room_that_became_too_small_is_made_anew(tmp_path: Path, slow_room: SlowRoom) -> None:
    """The first step of an optimizer makes its slots."""
    bench = Bench(tmp_path / "run")
    bench.persist()
    bench.intake.replica.reserve([(0, "/exp_avg", "float32", (2,))])
    slow_room.may.set()
    bench.persist_until_wanted()
    assert bench.base_scheduler.wanted is not None
    assert [size for _, size in slow_room.made] == [8, 16]


def test_a_wanted_copy_goes_with_the_replica_that_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "run")
    writer, intake, base_scheduler = bench.writer, bench.intake, bench.base_scheduler
    bench.persist()
    assert base_scheduler.wanted is not None
    publish(writer, [], b"", FLAG_GAP, 1)
    intake.take(may_apply=True, base=base_scheduler.wanted)

    def fails(*_: Any) -> Any:
        raise StoreError("the disk is away for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(term, "write_base", fails)
        wait_until(base_scheduler.save_before_reset, "what is saved before a reset", 10)
        bench.base_writer.wait()  # a copy may still be on its way when the replica may change
    intake.forget()
    publish(writer, [EDIT], b"half of ", 0, 2)  # the new base begins to arrive
    intake.take(may_apply=True)
    if base_scheduler.wanted is not None:
        base_scheduler.wanted.wanted_since = 0.0
    base_scheduler.look_after_copy()
    bench.base_writer.wait()
    assert not read_lineage(tmp_path / "run").candidates, "a base was written of what was given up"


def away(*_: Any) -> Any:
    raise StoreError("the disk is away for a moment")


def test_what_could_not_be_written_is_kept_until_the_new_base_begins_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tried again: it may be the newest that anybody ever has."""
    bench = Bench(tmp_path / "run")
    intake, base_scheduler = bench.intake, bench.base_scheduler
    publish(bench.writer, [], b"", FLAG_GAP, 1)
    intake.take(may_apply=True)

    def part() -> None:
        wait_until(base_scheduler.save_before_reset, "what is saved before a reset", 10)
        intake.forget(keep=base_scheduler.has_news)

    with monkeypatch.context() as patched:
        patched.setattr(term, "write_base", away)
        part()
    assert intake.whole and intake.waits_for_base and intake.step == 1
    assert bench.writer.requested_atoms() is None, "the trainer is asked all the same"
    bench.base_writer.trouble = bench.base_writer.trouble.retry_now()
    slow = threading.Event()
    write_base = term.write_base
    with monkeypatch.context() as patched:
        patched.setattr(term, "write_base", lambda *a: slow.wait(10) and write_base(*a))
        patched.setattr(BaseScheduler, "_can_afford_copy", lambda _: False)
        bench.persist()
        assert (
            bench.base_writer.busy and base_scheduler.holds_still and base_scheduler.wanted is None
        )
        publish(bench.writer, [EDIT], b"half of ", 0, 2)  # the new base begins to arrive
        intake.take(may_apply=not base_scheduler.holds_still)
        assert intake.whole, "what is written does not change"
        slow.set()
        bench.base_writer.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [1]
    intake.take(may_apply=not base_scheduler.holds_still)
    assert not intake.whole and not intake.waits_for_base


def test_a_copy_is_not_written_once_its_replica_is_known_to_be_wrong(tmp_path: Path) -> None:
    """The pass that fills it is the one whose fingerprints show that an atom had rotted."""
    bench = Bench(tmp_path / "run")
    base_scheduler = bench.base_scheduler
    bench.persist()
    assert base_scheduler.wanted is not None
    events = [
        Call(0, b"", b"\x01", 0, {}),
        Fingerprints(((0, ""),), 8),
        Seal(2, 1, b"rng", b"", (), 0),
    ]
    publish(bench.writer, events, bytes(16), FLAG_SEALED, 2)
    assert bench.intake.take(may_apply=True, base=base_scheduler.wanted) and bench.intake.drifted
    base_scheduler.look_after_copy()
    bench.base_writer.wait()
    assert not read_lineage(tmp_path / "run").candidates


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_is_set_neither_delays_bases_nor_hurries_them(
    jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "run")
    state = lambda: bench.base_writer.state  # noqa: E731
    bench.base_scheduler.options = Options(durable_every="1h")
    bench.base_scheduler.persist_if_due(asked=True, last_words=False, moving=False)
    bench.base_writer.wait()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    bench.call(step=2)
    assert bench.intake.take(may_apply=True)
    bench.base_scheduler.persist_if_due(asked=False, last_words=False, moving=False)
    bench.base_writer.wait()
    assert state().durable == Point(1, 1), "an hour has not passed"
    assert 0 <= state().durable_age_seconds < 60
    hour_ago = time.monotonic() - 3601
    bench.base_writer.state = msgspec.structs.replace(state(), durable_at=hour_ago)
    bench.base_scheduler.persist_if_due(asked=False, last_words=False, moving=False)
    bench.base_writer.wait()
    assert state().durable == Point(1, 2), "an hour has passed"
    told = describe_store(bench.base_writer, None, Shipper(tmp_path / "run", None, 0))
    assert 0 <= told["durable_age_seconds"] < 60


@pytest.mark.parametrize(
    ("jump", "due"),
    [(-86400.0, True), (86400.0, True), (60.0, False), (-1e9, True), (1e9, True)],
)
def test_a_base_from_before_a_clock_was_set_delays_none(
    jump: float, due: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shadow wrote it: all that is known of it is what the clock said then."""
    first = Bench(tmp_path / "run")
    first.base_scheduler.persist_if_due(asked=True, last_words=False, moving=False)
    first.base_writer.wait()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    base_writer = BaseWriter(tmp_path / "run", Point(1, 1), Rules())
    for _ in ("before it has claimed a term", "and behind"):
        assert base_writer.state.durable == Point(1, 1)
        age = base_writer.state.durable_age_seconds
        options = Options(durable_every="1h")
        assert base_is_due(options, step=2, durable_step=1, seconds_since_base=age) is due
        told = describe_store(base_writer, None, Shipper(tmp_path / "run", None, 0))
        shown = told["durable_age_seconds"]
        assert shown is None if abs(jump) > 1e8 or jump < 0 else shown >= 0
        json.dumps(told, allow_nan=False)
        base_writer.claim()


def test_the_next_base_is_expected_with_all_that_training_will_move(tmp_path: Path) -> None:
    """Before anything was replayed, and right behind a base, when nothing has changed yet."""
    atoms = (Atom("w", "float32", (1 << 20,)), Atom("frozen", "float32", (1 << 20,)))
    spec = OptimizerSpec("", "torch.optim.adam:Adam", Mode.REPLAY, ((0,),))
    replica = Replica(Census(atoms, (spec,), "exact"), None)
    replica.reserve_values()
    geometry = Geometry(slots=8, slot_bytes=4096)
    ring = RingReader(SharedMemory.create(geometry.bytes, "test"), geometry)
    intake = Intake(replica.census, ring, replica, SessionValues(1, b"rng", b"", (), ()))
    replica.based, replica.versions = [True, True], [1, 1]
    base_writer = BaseWriter(tmp_path / "run", None, Rules())
    base_scheduler = BaseScheduler(Options(), intake, base_writer)
    tensor = 4 << 20
    assert base_scheduler.base_bytes > 4 * tensor, "Adam will make two slots"
    base_scheduler.write_now()
    assert 3 * tensor < base_scheduler.base_bytes < 4 * tensor, "what is frozen is referred to"
    replica.reserve((0, slot, "float32", (1 << 20,)) for slot in ("/exp_avg", "/exp_avg_sq"))
    intake.state.calls = 1
    replica.versions[0] = 2
    assert 3 * tensor < base_scheduler.base_bytes < 4 * tensor


def test_a_gap_that_the_trainer_left_behind_takes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "run")
    bench.call(step=2)
    publish(bench.writer, [], b"", FLAG_GAP, 2)
    publish(bench.writer, [EDIT], b"rubbish!", 0, 9)
    while bench.intake.take(may_apply=True):
        pass
    assert bench.intake.waits_for_base and bench.intake.step == 2
    bench.intake.stay()
    assert bench.intake.whole and not bench.intake.gap and not bench.intake.take(may_apply=True)
    bench.intake.drop_unsealed()
    bench.base_scheduler.persist_if_due(asked=False, last_words=True, moving=False)
    bench.base_writer.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [2]
