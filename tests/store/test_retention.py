"""Retention on a real store, against a model: committed, tagged, rewound and removed in any order, it holds
exactly what the rules keep, every byte of it can be read, and nothing else lies on the disk."""

from __future__ import annotations

import errno
import hashlib
import itertools
import shutil
import tempfile
from pathlib import Path

import msgspec
import ondisk
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from states import random_states

from everystep.core.census import Atom, Census, Mode, OptimizerSpec
from everystep.core.events import Seal
from everystep.core.retention import Rules
from everystep.core.tensors import TensorRef
from everystep.errors import CorruptData, NothingToRecover, StepUnavailable, StoreError, UsageError
from everystep.format.base import Manifest, Point, SessionValues, after_seal
from everystep.recover.find import find_newest
from everystep.store import bases
from everystep.store.bases import BaseReader, read_base
from everystep.store.disk.files import RunPath
from everystep.store.disk.meter import Meter
from everystep.store.retention import plan_retention, unreferenced
from everystep.store.runs import Candidate, read_lineage, read_manifest
from everystep.store.snapshot import Snapshot, write_base
from everystep.store.tags import read_tags, remove_tag, set_tag
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run

SPEC = OptimizerSpec("", "torch.optim.adam:Adam", Mode.REPLAY, ((0, 1),))
CENSUS = Census((Atom("frozen", "uint8", (64,)), Atom("moved", "uint8", (32,))), (SPEC,), "exact")


def content(atom: int, slot: str, version: int) -> bytes:
    return hashlib.shake_128(f"{atom}/{slot}/{version}".encode()).digest(CENSUS.atoms[atom].bytes)


def snapshot(step: int, metric: float | None = None, thawed: int = 0) -> Snapshot:
    """The first atom last changed at `thawed`: bases refer to the one that was written then."""
    tensors = [
        TensorRef(atom, slot, "uint8", CENSUS.atoms[atom].shape, version, memoryview(data))
        for atom, version in enumerate((thawed, step))
        for slot in ("", "/exp_avg")
        for data in [content(atom, slot, version)]
    ]
    session = SessionValues(step, random_states(), b"", (b"",), (), metric)
    return Snapshot(step, CENSUS, tensors, session, b"", 0)


def check(run: Path, candidate: Candidate, thawed: int) -> None:
    """Every byte of a base, through what it refers to."""
    reader = BaseReader(run, read_base(run, candidate))
    versions = (thawed, candidate.entry.step)
    found = {(t.atom, t.slot): bytes(t.data) for t in reader.tensors()}
    slots = ("",) if candidate.weights_only else ("", "/exp_avg")
    assert found == {(a, s): content(a, s, versions[a]) for a in (0, 1) for s in slots}


class StoreModel(RuleBasedStateMachine):
    """`thawed` tells for each point the version of its first atom."""

    @initialize(
        last=st.integers(1, 3), every=st.sampled_from([0, 5]), best=st.sampled_from(["", "1 lowest"]),
        slots=st.integers(0, 2),
    )  # fmt: skip
    def begin(self, last: int, every: int, best: str, slots: int) -> None:
        self.folder = tempfile.mkdtemp()
        self.run = Path(self.folder) / "run"
        self.rules = Rules(last, keep_every=every, keep_best=best, keep_slots=slots)
        self.writer = TermWriter(self.run, None, self.rules)
        self.step = self.version = 0
        self.thawed: dict[Point, int] = {}
        self.pinned: dict[str, Point] = {}
        self.removed_since = False

    @rule(ahead=st.integers(1, 4), metric=st.one_of(st.none(), st.floats(0, 1)), thaw=st.booleans())
    def commit(self, ahead: int, metric: float | None, thaw: bool) -> None:
        self.step += ahead
        self.version = self.step if thaw else self.version
        self.writer.commit(snapshot(self.step, metric, self.version))
        self.thawed[Point(self.writer.manifest.term, self.step)] = self.version
        self.removed_since = False

    @precondition(lambda self: self.thawed)
    @rule()
    def apply_retention(self) -> None:
        self.writer.apply_retention()
        self.removed_since = True

    @precondition(lambda self: self.thawed)
    @rule(back=st.integers(0, 3), name=st.sampled_from("ab"))
    def tag(self, back: int, name: str) -> None:
        candidates = read_lineage(self.run).candidates
        chosen = candidates[min(back, len(candidates) - 1)]
        refused = name in self.pinned and self.pinned[name] != chosen.point
        if refused or chosen.weights_only:
            with pytest.raises((UsageError, StepUnavailable)):
                set_tag(self.run, name, chosen.entry.step)
        else:
            assert set_tag(self.run, name, chosen.entry.step).point == chosen.point
            self.pinned[name] = chosen.point

    @rule(name=st.sampled_from("ab"))
    def untag(self, name: str) -> None:
        if name in self.pinned:
            remove_tag(self.run, name)
            del self.pinned[name]
            self.removed_since = False
        else:
            with pytest.raises(StepUnavailable):
                remove_tag(self.run, name)

    @precondition(lambda self: self.thawed)
    @rule(back=st.integers(0, 2))
    def go_on_from(self, back: int) -> None:
        """A restart (0) or a rewind: a new term continues one of the whole bases."""
        whole = [c for c in read_lineage(self.run).candidates if not c.weights_only]
        chosen = whole[min(back, len(whole) - 1)]
        self.writer = TermWriter(self.run, chosen.point, self.rules)
        self.step, self.version = chosen.entry.step, self.thawed[chosen.point]
        self.removed_since = False

    @invariant()
    def everything_that_counts_can_be_read(self) -> None:
        if not hasattr(self, "run"):
            return
        lineage = read_lineage(self.run)
        tags = read_tags(self.run)
        assert {name: c.point for name, c in tags.items()} == self.pinned
        for candidate in (*lineage.candidates, *tags.values()):
            check(self.run, candidate, self.thawed[candidate.point])
        if lineage.candidates:
            found, _ = find_newest(self.run, None)
            assert found is not None and found.point == lineage.candidates[0].point
        if self.removed_since:
            term = self.writer.manifest.term
            assert unreferenced(self.run, lineage.candidates, term) == []
            steps = [c.entry.step for c in lineage.candidates]
            in_lineage = {c.point for c in lineage.candidates} & set(self.pinned.values())
            if not self.rules.keep_every and not self.rules.keep_best:
                assert len(steps) <= self.rules.keep_last + len(in_lineage)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestStore = StoreModel.TestCase
TestStore.settings = settings(max_examples=12, stateful_step_count=16)


def test_nothing_goes_while_the_newest_base_cannot_be_read_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(1))
    writer.commit(snapshot(1))
    writer.commit(snapshot(2))
    victim = ondisk.part_dir(run, 1, 2) / ondisk.WEIGHTS
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CorruptData, match="checksum"):
        writer.apply_retention()
    assert [c.entry.step for c in read_lineage(run).candidates] == [2, 1]
    found, _ = find_newest(run, None)
    assert found is not None and found.point.step == 1
    writer.commit(snapshot(3, thawed=3))
    writer.apply_retention()
    assert verify_run(run).valid == [3]


def test_a_tag_leads_to_a_base_that_was_rewound_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = TermWriter(run, None, Rules(1))
    for step in (1, 2):
        first.commit(snapshot(step))
    set_tag(run, "before", 2)
    second = TermWriter(run, Point(1, 1), Rules(1))
    for step in (2, 3, 4):
        second.commit(snapshot(step, thawed=step))
        second.apply_retention()
    assert [c.point for c in read_lineage(run).candidates] == [Point(2, 4)]
    pinned = read_tags(run)["before"]
    assert pinned.point == Point(1, 2)
    check(run, pinned, 0)
    report = verify_run(run)
    assert report.problems == [] and report.valid == [4]
    (ondisk.part_dir(run, 1, 2) / ondisk.SESSION).write_bytes(b"rotten")
    report = verify_run(run)
    assert ondisk.SESSION in report.problems[0] and report.valid == [4]


def test_a_tag_that_comes_while_others_are_removed(tmp_path: Path) -> None:
    """Decided before it came, carried out after it: the base stays. Too late is said to be too late."""
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(1))
    for step in (1, 2, 3):
        writer.commit(snapshot(step))
    lineage = read_lineage(run)
    plan = plan_retention(run, lineage, Rules(1))
    assert [c.entry.step for c in plan.drop] == [2, 1]
    set_tag(run, "late", 1)
    writer.carry_out(plan)
    check(run, read_tags(run)["late"], 0)
    with pytest.raises(StepUnavailable, match="step 2"):
        set_tag(run, "later", 2)
    assert set(read_tags(run)) == {"late"}


def test_a_damaged_tag_stops_retention_and_nothing_else(tmp_path: Path) -> None:
    """Nobody knows what it pins."""
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(1))
    writer.commit(snapshot(1))
    set_tag(run, "precious", 1)
    ondisk.tag_path(run, "precious").write_bytes(b"everystep tag 1 2 ab\n{}")
    writer.commit(snapshot(2))
    with pytest.raises(CorruptData, match="precious"):
        writer.apply_retention()
    report = verify_run(run)
    assert report.valid == [2, 1] and "precious" in report.problems[0]
    remove_tag(run, "precious")
    writer.apply_retention()
    assert verify_run(run).valid == [2]


@pytest.mark.parametrize("name", ["", "latest", "12", "a/b", "../x", ".hidden", "x" * 101, "ä b"])
def test_names_that_no_tag_may_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="tag"):
        set_tag(tmp_path, name, 1)
    with pytest.raises(UsageError, match="tag"):
        remove_tag(tmp_path, name)


def test_a_base_without_slots_is_not_resumed_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(3, keep_slots=1))
    for step in (1, 2):
        writer.commit(snapshot(step))
        writer.apply_retention()
    assert [c.weights_only for c in read_lineage(run).candidates] == [False, True]
    with pytest.raises(StepUnavailable, match="only its weights"):
        find_newest(run, None, 1)
    assert verify_run(run).problems == []
    (ondisk.part_dir(run, 1, 2) / ondisk.WEIGHTS).unlink()
    with pytest.raises(NothingToRecover):  # what is left of step 1 is no state
        find_newest(run, None)


def test_rules_and_metrics_are_remembered(tmp_path: Path) -> None:
    rules = Rules(2, keep_best="1 lowest")
    writer = TermWriter(tmp_path / "run", None, rules)
    for step, metric in ((1, 0.5), (2, float("nan")), (3, None)):
        writer.commit(snapshot(step, metric))
    manifest = read_manifest(tmp_path / "run", 1)
    assert manifest is not None and manifest.rules == rules
    assert [entry.metric for entry in manifest.bases] == [0.5, None, None]


def test_what_is_gone_does_not_come_back_with_a_rewind(tmp_path: Path) -> None:
    """Term 2 removes a base of term 1, then the run goes on from another base of term 1."""
    run = tmp_path / "run"
    first = TermWriter(run, None, Rules(2))
    for step in (1, 2):
        first.commit(snapshot(step))
    second = TermWriter(run, Point(1, 2), Rules(2))
    second.commit(snapshot(3))
    second.apply_retention()
    TermWriter(run, Point(1, 2), Rules(2))
    assert [c.point for c in read_lineage(run).candidates] == [Point(1, 2)]
    assert verify_run(run).problems == []


def test_documents_from_before_there_were_rules_are_read() -> None:
    """What older stores lack has a default: seals, session values, entries, manifests, a census."""
    old_seal = msgspec.msgpack.encode(["seal", 7, 6, b"rng", b"", [b"groups"], 99])
    seal = msgspec.msgpack.decode(old_seal, type=Seal)
    session = {"step": 6, "rng": b"", "state": b"s", "groups": [b""], "values": []}
    before = msgspec.convert(session, SessionValues)
    assert after_seal(before, seal) == SessionValues(7, b"rng", b"s", (b"groups",), (), None)
    entry = {"step": 7, "digest": "d" * 32, "new_bytes": 1, "total_bytes": 1, "time": 0.5}
    manifest = msgspec.convert(
        {
            "run_id": "r" * 32,
            "term": 1,
            "continues": None,
            "host": "h",
            "pid": 1,
            "bases": [entry],
        },
        Manifest,
    )
    assert manifest.bases[0].metric is None and not manifest.slimmed and manifest.rules == Rules()
    assert msgspec.convert({"atoms": [], "optimizers": [], "exactness": "exact"}, Census)


def test_an_index_that_cannot_be_read_now_is_not_one_that_refers_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails once while retention looks what is still needed: the next turn goes on."""
    run, plain = tmp_path / "run", bases.read_file
    writer = TermWriter(run, None, Rules(1))
    writer.commit(snapshot(1))
    writer.commit(snapshot(2))  # its first atom lies in the base of step 1
    refused = itertools.count()

    def broken(path: RunPath) -> bytes:
        if next(refused):  # the base was read back before
            raise OSError(errno.EIO, "Input/output error", str(path))
        return plain(path)

    monkeypatch.setattr(bases, "read_file", broken)
    with pytest.raises((OSError, CorruptData), match="Input/output"):
        writer.apply_retention()
    assert next(refused) == 2
    monkeypatch.undo()
    assert verify_run(run).problems == []
    writer.apply_retention()
    assert verify_run(run).valid == [2]


def test_a_base_that_no_reader_would_take_is_not_called_durable(tmp_path: Path) -> None:
    run, writer = tmp_path / "run", TermWriter(tmp_path / "run", None, Rules())
    writer.commit(snapshot(1))
    good = snapshot(2)
    wrong = good._replace(
        tensors=[msgspec.structs.replace(good.tensors[0], shape=(2, 32)), *good.tensors[1:]]
    )
    with pytest.raises(StoreError, match="nobody could load"):
        writer.commit(wrong)
    assert [c.entry.step for c in read_lineage(run).candidates] == [1]
    writer.commit(good)
    assert [c.entry.step for c in read_lineage(run).candidates] == [2, 1]


def test_reading_back_and_removing_are_counted(tmp_path: Path) -> None:
    """Whoever waits for a flush sees that something is done, however long it takes."""
    meter = Meter()
    writer = TermWriter(tmp_path / "run", None, Rules(keep_last=1), meter=meter)
    writer.commit(snapshot(1))
    written = meter.operations
    assert written > 0
    writer.apply_retention()  # nothing to forget, nothing to check
    assert meter.operations == written
    writer.commit(snapshot(2))
    written = meter.operations
    removed = sum(p.is_file() for p in ondisk.base_dir(tmp_path / "run", 1, 1).rglob("*"))
    writer.apply_retention()
    assert meter.operations - written > removed > 0


def test_what_another_rank_has_written_is_referred_to(tmp_path: Path) -> None:
    """Ranks are numbered anew at every attach."""
    run = tmp_path / "run"
    ondisk.term_dir(run, 1).mkdir(parents=True)
    _, earlier = write_base(run, "ab" * 16, 1, snapshot(1)._replace(rank=5), None)
    _, later = write_base(run, "ab" * 16, 1, snapshot(2), earlier)
    assert {(file.step, file.rank) for file in later.files} == {(1, 5), (2, 0)}
    found = {t.key: bytes(t.data) for t in BaseReader(run, later).tensors()}
    slots = ("", "/exp_avg")
    assert found == {(a, s): content(a, s, v) for a, v in ((0, 0), (1, 2)) for s in slots}
