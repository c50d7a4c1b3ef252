"""Directory and bucket: the newer lineage wins, zombies commit nothing, half a file never counts."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ondisk
import pytest
from crash.writer import CENSUS, snapshot
from hostile.traces import listing
from states import random_states
from typer.testing import CliRunner

from everystep.cli.app import app
from everystep.core.census import Atom, Census
from everystep.core.tensors import TensorRef
from everystep.core.tiers import Passed, TermMark, Tier, newer_tier
from everystep.errors import CorruptData, Fenced, NotARun, StoreError, UsageError
from everystep.format.base import Point, SessionValues
from everystep.format.log import LoggedRecord, census_digest
from everystep.store import runs
from everystep.store.bucket.client import PART_BYTES, Bucket
from everystep.store.bucket.commits import commit_numbers, read_newest
from everystep.store.bucket.fetch import fetch_documents
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.ship_log import LogEnd, LogShipper
from everystep.store.bucket.tiers import local_dir, locate, sync_from_bucket
from everystep.store.disk.meter import Throttle
from everystep.store.log import LogWriter
from everystep.store.log_reader import read_log
from everystep.store.reader import open_run
from everystep.store.runs import read_lineage
from everystep.store.snapshot import Snapshot
from everystep.store.tags import read_tags, remove_tag, set_tag
from everystep.store.verify import verify_bucket, verify_run

from .hosts import Host, bases_in_bucket, files_of, load, missing_in_bucket, objects_in
from .server import Proxy


def test_the_directory_is_lost(url: str, tmp_path: Path) -> None:
    first = Host(tmp_path / "a", url)
    first.commit(1, 2, 3)
    first.ship()
    other = Host(tmp_path / "b", url)
    assert other.bucket_won and load(other.run) == 3
    assert files_of(other.run) == files_of(first.run)
    assert verify_run(other.run).problems == []
    other.commit(4)
    other.ship()
    shutil.rmtree(first.run)
    assert open_run(url).steps == [3, 4]
    assert load(local_dir(url)) == 4


def test_large_files_go_in_parts(url: str, tmp_path: Path) -> None:
    size = 2 * PART_BYTES + 123457
    data = random.Random(3).randbytes(size)
    one = TensorRef(0, "", "uint8", (size,), 1, memoryview(data))
    census = Census((Atom("large", "uint8", (size,)),), (), "exact")
    host = Host(tmp_path / "a", url)
    host.writer.commit(
        Snapshot(1, census, [one], SessionValues(1, random_states(), b"", (), ()), b"", 0)
    )
    host.ship()
    assert verify_bucket(url).problems == []
    assert open_run(url).tensors()["large"].tobytes() == data


def test_retention_follows_the_directory(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "a", url)
    for step in range(1, 7):
        host.commit(step)
        host.ship()
        assert bases_in_bucket(url, tmp_path / str(step)) == {
            c.point for c in read_lineage(host.run).candidates
        }
        assert objects_in(url).listing() == files_of(host.run)
        assert not objects_in(url).others()
    assert len(commit_numbers(Bucket(url))) == 2


def test_tags_go_with_the_bases_they_pin(url: str, tmp_path: Path) -> None:
    first = Host(tmp_path / "a", url)
    first.commit(1, 2)
    first.ship()
    set_tag(first.run, "best", 1)
    assert not first.shipper.has_all_tags
    first.ship()
    assert first.shipper.has_all_tags
    other = Host(tmp_path / "b", url)
    assert read_tags(other.run) == read_tags(first.run)
    other.commit(3, 4, 5)
    other.ship()
    pinned = next(c.point for c in read_lineage(other.run).candidates if c.entry.step == 1)
    assert pinned in bases_in_bucket(url, tmp_path / "pinned")
    remove_tag(other.run, "best")
    other.commit(6)
    other.ship()
    third = Host(tmp_path / "c", url)
    assert read_tags(third.run) == {} and load(third.run) == 6
    assert pinned not in bases_in_bucket(url, tmp_path / "free")


def test_a_damaged_tag_does_not_stop_shipping(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "a", url)
    host.commit(1)
    set_tag(host.run, "best", 1)
    host.ship()
    ondisk.tag_path(host.run, "best").write_bytes(b"nothing of the kind")
    host.writer.commit(snapshot(2))
    host.ship()
    again = BaseShipper(Bucket(url), host.run, host.writer.manifest.term, Throttle(0))
    host.writer.commit(snapshot(3))
    again.turn()  # one that has committed nothing itself yet
    other = Host(tmp_path / "b", url)
    assert load(other.run) == 3 and list(read_tags(other.run)) == ["best"]
    documents = fetch_documents(Bucket(url), read_newest(Bucket(url)), tmp_path / "documents")
    assert documents.candidates and list(read_tags(tmp_path / "documents")) == ["best"]


def test_a_base_that_retention_drops_meanwhile_is_shipped_all_the_same(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow bucket and quick bases: each would be gone before it was up."""
    host = Host(tmp_path / "a", url, keep=1)
    host.commit(1)
    host.ship()
    put = Bucket.put
    steps = iter((3, 4))

    def slow(self: Bucket, path: str, data: bytes) -> None:
        for step in steps:
            host.commit(step)
        put(self, path, data)

    host.commit(2)
    monkeypatch.setattr(Bucket, "put", slow)
    host.ship()
    assert bases_in_bucket(url, tmp_path / "documents") == {Point(1, 2)}
    assert missing_in_bucket(url, tmp_path / "documents") == []
    host.ship()
    assert bases_in_bucket(url, tmp_path / "documents") == {Point(1, 4)}


def test_a_zombie_is_fenced(url: str, tmp_path: Path) -> None:
    zombie = Host(tmp_path / "a", url)
    zombie.commit(1)
    zombie.ship()
    owner = Host(tmp_path / "b", url)
    owner.ship()
    zombie.commit(9)
    with pytest.raises(Fenced, match="another term owns it"):
        zombie.ship()
    owner.commit(2)
    owner.ship()
    with pytest.raises(Fenced):
        zombie.ship()
    assert load(Host(tmp_path / "c", url).run) == 2
    assert missing_in_bucket(url, tmp_path / "documents") == []


def test_commits_whose_answers_were_lost_are_our_own(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put was done, nobody said so, and the bucket could not be asked: that is not another writer."""
    create = Bucket.create

    def deaf(self: Bucket, path: str, data: bytes) -> bool:
        create(self, path, data)
        raise StoreError("the answer was lost")

    host = Host(tmp_path / "a", url)
    for step in (1, 2, 3):
        host.commit(step)
        with monkeypatch.context() as patch, pytest.raises(StoreError, match="lost"):
            patch.setattr(Bucket, "create", deaf)
            host.ship()
        host.ship()
        assert load(Host(tmp_path / f"at{step}", url).run) == step
        assert missing_in_bucket(url, tmp_path / f"documents{step}") == []


def test_two_writers_race_for_a_term(url: str, tmp_path: Path) -> None:
    first = Host(tmp_path / "a", url)
    first.commit(1)
    first.ship()
    racers = [Host(tmp_path / name, url) for name in "bcde"]
    assert {racer.writer.manifest.term for racer in racers} == {2}

    def claim(racer: Host) -> bool:
        try:
            racer.ship()
        except Fenced:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(claim, racers))
    assert won.count(True) == 1
    for step, racer in zip((10, 11, 12, 13), racers, strict=True):
        racer.commit(step)
    assert [claim(racer) for racer in racers] == won
    winner = (10, 11, 12, 13)[won.index(True)]
    assert load(Host(tmp_path / "f", url).run) == winner
    loser = racers[won.index(False)]
    with pytest.raises(UsageError, match="each on its own"):
        sync_from_bucket(loser.run, url)


def test_an_older_directory_is_brought_up(url: str, tmp_path: Path) -> None:
    old = Host(tmp_path / "a", url)
    old.commit(1, 2)
    old.ship()
    other = Host(tmp_path / "b", url)
    other.commit(3, 4)
    other.ship()
    again = Host(old.run, url)
    assert again.bucket_won and load(again.run) == 4
    again.commit(5)
    again.ship()
    assert load(Host(tmp_path / "c", url).run) == 5
    assert not Host(again.run, url).bucket_won, "its own directory is the newer one"


def diverge(url: str, tmp_path: Path, *, by_log: bool) -> Path:
    """A host that was fenced has steps that the one that went on never saw: 9, or by the log 3."""
    old = Host(tmp_path / "a", url)
    old.commit(1, 2)
    old.ship()
    other = Host(tmp_path / "b", url)
    other.commit(3, 4)
    other.ship()
    if by_log:
        log = LogWriter(
            old.run, old.writer.manifest.run_id, old.writer.manifest.term, census_digest(CENSUS)
        )
        log.append([LoggedRecord(3, 2, memoryview(b"a record"))])
        log.close()
    else:
        old.commit(9)
    return old.run


@pytest.mark.parametrize("by_log", [False, True])
def test_of_two_lines_none_is_chosen_in_silence(
    by_log: bool, url: str, tmp_path: Path, plain_bodies: None
) -> None:
    run = diverge(url, tmp_path, by_log=by_log)
    before = listing(run)
    found = f"the directory to step {3 if by_log else 9} in term 1, the bucket at least to step 4 in term 2"
    for _ in range(2):
        with pytest.raises(UsageError, match="each on its own") as caught:
            Host(run, url)
        assert found in str(caught.value) and "--take" in (caught.value.hint or "")
        assert listing(run) == before


def command(*words: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("which", ["directory", "bucket"])
def test_who_decides_between_two_lines_keeps_both(which: str, url: str, tmp_path: Path) -> None:
    run = diverge(url, tmp_path, by_log=False)
    words = ["rewind", run, "--take", which, "--bucket", url]
    assert command(*words)[0] == 2, "nobody has agreed"
    code, told = command(*words, "--yes")
    assert code == 0 and told["took"] == which
    kept, taken = Path(told["kept"]), 9 if which == "directory" else 4
    assert kept.parent == run.parent and load(kept) == 13 - taken
    assert verify_run(kept).problems == [] and load(run) == taken
    host = Host(run, url)
    host.commit(20)
    host.ship()
    assert load(Host(tmp_path / "c", url).run) == 20
    assert not Host(run, url).bucket_won
    assert missing_in_bucket(url, tmp_path / "documents") == []
    assert verify_bucket(url).problems == []
    code, told = command(*words, "--yes")
    assert code == 2 and "goes on from the other" in told["error"], (
        "there is nothing left to decide"
    )


def test_a_decision_needs_two_tiers(url: str, tmp_path: Path) -> None:
    Host(tmp_path / "a", url).commit(1)
    for words, said in (
        (["--take", "bucket"], "which bucket?"),
        ([], "one of STEP and --take"),
        (["1", "--take", "bucket", "--bucket", url], "one of STEP and --take"),
    ):
        code, told = command("rewind", tmp_path / "a", *words, "--yes")
        assert code == 2 and said in told["error"], told


def test_a_term_that_holds_nothing_hides_nothing(url: str, tmp_path: Path) -> None:
    first = Host(tmp_path / "a", url)
    first.commit(1)
    first.ship()
    for _ in range(4):
        Host(tmp_path / "b", url)  # claims, and dies before it has shipped anything
    other = Host(tmp_path / "c", url)
    other.commit(2)
    other.ship()
    claimed = Host(tmp_path / "d", url)
    claimed.ship()  # claims in the bucket too, and dies
    last = Host(tmp_path / "b", url)
    assert last.bucket_won and load(last.run) == 2
    last.commit(3)
    last.ship()
    assert load(Host(tmp_path / "e", url).run) == 3


@pytest.mark.parametrize(
    "damage", ["flip", "file", "index", "base", "manifest", "run", "id", "older"]
)
def test_a_broken_directory_is_healed(damage: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    host = Host(tmp_path / "a", url)
    host.commit(1)
    shutil.copytree(host.run, tmp_path / "then")
    host.commit(2, 3)
    host.ship()
    run = host.run
    part = ondisk.part_dir(run, 1, 3)
    if damage == "flip":
        data = bytearray((part / ondisk.SLOTS).read_bytes())
        data[200] ^= 1
        (part / ondisk.SLOTS).write_bytes(data)
    elif damage == "id":
        (run / ondisk.RUN_DOCUMENT).write_bytes(b"torn")
    elif damage == "older":
        shutil.rmtree(run)
        (tmp_path / "then").rename(run)
    else:
        names = {"file": part / ondisk.WEIGHTS, "index": part / ondisk.INDEX}
        names["base"] = ondisk.base_dir(run, 1, 3) / ondisk.BASE
        names["manifest"] = ondisk.term_dir(run, 1) / ondisk.MANIFEST
        names["run"] = run / ondisk.RUN_DOCUMENT
        names[damage].unlink()
    sync_from_bucket(run, url)
    assert load(run) == 3
    assert verify_run(run).problems == []


def test_a_damaged_object_is_never_loaded(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "a", url)
    host.commit(1)
    host.ship()
    path = next(p for p in Bucket(url).listing("terms") if p.endswith(ondisk.WEIGHTS))
    data = bytearray(Bucket(url).read(path) or b"")
    data[len(data) // 2] ^= 1
    Bucket(url).put(path, bytes(data))
    with pytest.raises(CorruptData, match="checksum"):
        sync_from_bucket(tmp_path / "b", url)
    with pytest.raises(NotARun):
        read_lineage(tmp_path / "b")
    assert not list((tmp_path / "b").rglob(f"*{ondisk.WEIGHTS}*")), "half a file was left behind"


def test_a_rotten_base_is_not_shipped(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "a", url)
    host.commit(1, 2)
    weights = ondisk.part_dir(host.run, 1, 2) / ondisk.WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CorruptData, match="checksum"):
        host.ship()
    assert bases_in_bucket(url, tmp_path / "documents") == {Point(1, 1)}
    assert load(Host(tmp_path / "b", url).run) == 1


def test_a_bucket_of_another_run_is_refused(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "a", url)
    host.commit(1)
    stranger = Host(tmp_path / "b", url)  # before the bucket held anything
    stranger.commit(5)
    host.ship()
    with pytest.raises(UsageError, match="a prefix of its own") as caught:
        stranger.ship()
    assert "holds run" in str(caught.value)
    with pytest.raises(UsageError, match="a prefix of its own"):
        sync_from_bucket(stranger.run, url)


def test_a_bucket_that_cannot_be_reached(proxy: Proxy, s3_url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "a", s3_url)
    host.commit(1)
    host.ship()
    proxy.refuses = True
    assert load(Host(host.run, s3_url).run) == 1, "the directory is enough"
    with pytest.raises(StoreError, match="503"):
        sync_from_bucket(
            tmp_path / "b", s3_url
        )  # whether there is something to resume is not known


def records(first: int, last: int) -> list[LoggedRecord]:
    return [LoggedRecord(s, s - 1, memoryview(bytes([s]) * 3000)) for s in range(first, last + 1)]


@pytest.mark.usefixtures("plain_bodies")
def test_the_log_is_shipped_as_it_grows(url: str, tmp_path: Path) -> None:
    host = Host(tmp_path / "a", url)
    host.commit(1)
    host.ship()
    writer = LogWriter(host.run, host.writer.manifest.run_id, 1, census_digest(CENSUS))
    shipper = LogShipper(Bucket(url), host.run, 1, lambda _: None)
    for step in (2, 4, 6):
        writer.append(records(step, step + 1))
        shipper.turn(LogEnd(*writer.end, step + 1))
        sync_from_bucket(tmp_path / f"at{step}", url)
        assert logged(tmp_path / f"at{step}") == step + 1
    synced = LogEnd(*writer.end, 7)
    writer.append(records(8, 8))  # not said to be synced: it may still change
    shipper.turn(synced)
    sync_from_bucket(tmp_path / "b", url)
    assert logged(tmp_path / "b") == 7
    segment = ondisk.segments(host.run, 1)[0]
    segment.write_bytes(segment.read_bytes()[:5000])
    sync_from_bucket(host.run, url)
    assert logged(host.run) == 7, "a torn segment is healed"
    host.commit(8, 9, 10)
    writer.close()
    writer.append(records(11, 11))
    host.commit(11, 12)
    host.ship()
    there = {path.rpartition("/")[0] for path in objects_in(url).listing() if "/log/" in path}
    here = {str(path.relative_to(host.run)) for path in ondisk.segments(host.run, 1)}
    assert there <= here, "what retention dropped is dropped there"


def logged(run: Path) -> int:
    lineage = read_lineage(run)
    return read_log(run, lineage, lineage.candidates[-1].point, CENSUS).end.step


@pytest.mark.usefixtures("plain_bodies")
def test_a_healthy_segment_is_never_replaced(url: str, tmp_path: Path) -> None:
    """Its writer may hold it open: what it appends must not go to a file without a name."""
    host = Host(tmp_path / "a", url)
    host.commit(1)
    host.ship()
    writer = LogWriter(host.run, host.writer.manifest.run_id, 1, census_digest(CENSUS))
    writer.append(records(2, 3))
    LogShipper(Bucket(url), host.run, 1, lambda _: None).turn(LogEnd(*writer.end, 3))
    with ondisk.segments(host.run, 1)[0].open("ab") as torn:
        torn.write(b"half a record" * 10)
    before = ondisk.segments(host.run, 1)[0].stat().st_ino
    sync_from_bucket(host.run, url)
    assert ondisk.segments(host.run, 1)[0].stat().st_ino == before


def test_the_writer_goes_on_while_somebody_fetches(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(tmp_path / "a", url, keep=1)
    host.commit(1)
    host.ship()
    read_part = Bucket.read_part
    steps = iter((2, 3))

    def late(self: Bucket, path: str, start: int, end: int) -> memoryview:
        for step in steps:  # what is being read is gone from the bucket now
            host.commit(step)
            host.ship()
        return read_part(self, path, start, end)

    monkeypatch.setattr(Bucket, "read_part", late)
    assert sync_from_bucket(tmp_path / "b", url)
    assert load(tmp_path / "b") == 3


def test_a_base_that_is_committed_while_another_is_shipped_goes_with_the_next_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two reads of the run: what is taken for shipped has to be what was."""
    real = runs.read_file
    for number in itertools.count():
        host = Host(tmp_path / f"{number}", f"file://{tmp_path}/bucket{number}")
        host.commit(1)
        reads = itertools.count()

        def read(*given: Any, n: int = number, h: Host = host, c: Any = reads) -> bytes:
            if next(c) == n:
                h.commit(2)
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(runs, "read_file", read)
            host.ship()
        host.ship()
        newest = host.shipper.newest
        assert (
            newest is not None
            and newest.entry.step == read_lineage(host.run).candidates[0].entry.step
        )
        if next(reads) <= number:
            break
    assert number > 4, "this test shows nothing"


def test_what_is_sent_keeps_below_a_rate() -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    throttle, free = (Throttle(rate, lambda: now[0], sleep) for rate in (1000, 0))
    for size in (500, 2500, 1000):
        throttle(size)
    assert now[0] == 104.0 and throttle.total == 4000
    now[0] += 1000.0
    throttle(3000)  # an idle hour is no licence for a burst
    assert now[0] == 1107.0
    free(10**12)
    assert now[0] == 1107.0


def test_which_tier_is_newer() -> None:
    a, b, x = (TermMark(token, 5) for token in "abx")
    later, further, none = TermMark("b", 6), TermMark("a", 7), TermMark("n", -1)
    back = {"a": [Passed(3, 5)]}
    cases: list[tuple[Tier, Tier, str]] = [
        (Tier({}), Tier({}), "local"),
        (Tier({1: a}), Tier({}), "local"),
        (Tier({}), Tier({1: a}), "bucket"),
        (Tier({1: a}), Tier({1: a, 2: b}), "bucket"),
        (Tier({1: a, 2: b}), Tier({1: a}), "local"),
        (Tier({1: a, 2: b}), Tier({1: a, 2: b}), "local"),
        (Tier({1: a, 2: later}), Tier({1: a, 2: b}), "local"),
        (Tier({1: a, 2: b}), Tier({1: a, 2: later}), "bucket"),
        (Tier({1: a, 2: b}), Tier({1: a, 2: x}), "neither"),
        (Tier({1: a, 2: b}), Tier({1: a, 3: x}), "neither"),
        # one has gone on behind what the other has seen of it
        (Tier({1: further}), Tier({1: a, 2: b}), "neither"),
        (Tier({1: further}), Tier({1: a, 2: b}, {1: 7}), "bucket"),
        (Tier({1: further}), Tier({1: a, 2: b}, {1: 6}), "neither"),
        (Tier({1: a, 2: b}, {1: 3}), Tier({1: a}), "local"),  # rewound to step 3
        (Tier({1: a, 2: b}, {1: 3}), Tier({1: further}), "neither"),
        # somebody has decided
        (Tier({1: a, 2: b}, over={"x": [Passed(-2, 5)]}), Tier({1: a, 2: x}), "local"),
        (
            Tier({1: a, 2: b}, over={"x": [Passed(-2, 4)]}),
            Tier({1: a, 2: x}),
            "neither",
        ),  # it went on since
        (Tier({1: further, 2: x}), Tier({1: a, 2: b}, over={"x": [Passed(-2, 5)]}), "bucket"),
        # a term that the newest goes on from is lost here
        (
            Tier({1: a, 3: none}, {2: 7, 1: 5}),
            Tier({1: a, 2: later, 3: none}, {2: 6, 1: 5}),
            "bucket",
        ),
        # back to step 3, which the bucket has not heard of, or has
        (Tier({1: a, 2: none}, {1: 3}, back), Tier({1: a}), "local"),
        (Tier({1: a, 2: none}, {1: 3}, back), Tier({1: further}), "neither"),
        (Tier({1: a, 2: none}, {1: 3}, back), Tier({1: a, 3: x}, {1: 5}), "neither"),
        (Tier({1: a, 2: none}, {1: 3}, back), Tier({1: a, 3: x}, {1: 5}, back), "bucket"),
        # what is passed over in two parts, with a gap between them
        (Tier({2: b}, over={"a": [Passed(-2, 3), Passed(5, 9)]}), Tier({1: a}), "neither"),
        # what it went back to is not passed over, and the bucket has never seen it
        (Tier({1: a, 2: none}, {1: 3}, back), Tier({4: x}, {}, back), "neither"),
        # a claim that holds nothing yet stands for what it goes on from
        (Tier({1: further, 2: none}, {1: 7}), Tier({1: a, 3: x}, {1: 5}), "neither"),
        (Tier({1: a, 2: none}, {1: 5}), Tier({1: a, 3: x}, {1: 5}), "bucket"),
        (
            Tier({1: a, 2: x}, {1: 5}),
            Tier({1: a, 3: none}, {1: 5}),
            "neither",
        ),  # who may be training
        (Tier({1: a, 2: none}, {1: 5}), Tier({1: further, 2: none}, {1: 7}), "neither"),
    ]
    for local, bucket, winner in cases:
        assert newer_tier(local, bucket) == winner, (local, bucket)


def test_where_the_local_tier_lies(tmp_path: Path, local_tiers: Path) -> None:
    path, bucket = locate("s3://bucket/prefix/")
    assert path.parent == local_tiers and bucket == "s3://bucket/prefix"
    assert path == local_dir("s3://bucket/prefix") != local_dir("s3://bucket/prefix2")
    assert locate(tmp_path, "s3://bucket/x") == (tmp_path, "s3://bucket/x")
    with pytest.raises(UsageError, match="another bucket"):
        locate("s3://bucket/x", "s3://bucket/y")
