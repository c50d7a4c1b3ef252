"""What somebody, or a fault, has put into a bucket: all that it says gives errors of ours, and costs no more
than what it damaged."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import msgspec
import ondisk
import pytest
import xxhash

from everystep.errors import CorruptData, Fenced, StoreError, UnknownVersion
from everystep.format.commit import Commit
from everystep.format.document import VERSION, pack_document, unpack_document
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.commits import commit_numbers, commit_path, read_newest
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.tiers import sync_from_bucket
from everystep.store.disk.meter import Throttle
from everystep.store.verify import verify_bucket

from .hosts import Host, load, objects_in


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(f"file://{tmp_path}/bucket")


@pytest.fixture
def host(bucket: Bucket, tmp_path: Path) -> Host:
    """Whose bases 1 and 2 are in the bucket."""
    host = Host(tmp_path / "a", bucket.url)
    host.commit(1, 2)
    host.ship()
    return host


def flip(bucket: Bucket, path: str) -> None:
    data = bytearray(bucket.read(path) or b"")
    data[-1] ^= 1
    bucket.put(path, bytes(data))


def newest_commit(bucket: Bucket) -> Commit:
    commit = read_newest(bucket)
    assert commit is not None
    return commit


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("number", [10**18 - 1, 10**17, 10**12, 10**12 - 1])
def test_a_number_that_nobody_reaches_fences_as_before(
    number: int, host: Host, bucket: Bucket, tmp_path: Path
) -> None:
    """Behind 999999999999999999 came a number of 19 digits, which nobody lists: the commits before it were
    removed, and another host claimed number 1."""
    bucket.put(commit_path(number), b"x")
    shutil.copytree(host.run, tmp_path / "b")
    hosts = [Host(run, bucket.url) for run in (host.run, tmp_path / "b")]
    owners = []
    for step, claiming in enumerate(hosts, 3):
        claiming.commit(step)
        try:
            claiming.ship()
            owners.append(step)
        except Fenced:
            assert owners, "nobody owns it"
        except StoreError as error:
            assert number == 10**12 - 1 and commit_path(number) in str(error)
    assert len(owners) == (number != 10**12 - 1)
    assert load(Host(tmp_path / "c", bucket.url).run) == (owners or [2])[0]


def test_a_commit_says_its_own_number(host: Host, bucket: Bucket) -> None:
    newest = newest_commit(bucket)
    later = msgspec.structs.replace(newest, number=10**12 + 5)
    bucket.put(commit_path(10**12 + 5), pack_document("commit", later))
    assert read_newest(bucket) == newest
    with pytest.raises(CorruptData):
        unpack_document("commit", pack_document("commit", later), Commit, "here")


# ---------------------------------------------------------------------- commits


def test_a_commit_of_a_newer_version_is_told(host: Host, bucket: Bucket, tmp_path: Path) -> None:
    """It was taken for a bucket that cannot be reached, and a stale directory was gone on from."""
    stale = tmp_path / "stale"
    shutil.copytree(host.run, stale)
    number = commit_numbers(bucket)[0]
    body = (bucket.read(commit_path(number)) or b"").partition(b"\n")[2]
    head = f"commit {VERSION + 1} {len(body)}"
    digest = xxhash.xxh3_128_hexdigest(head.encode() + b"\n" + body)
    bucket.put(commit_path(number + 1), f"everystep {head} {digest}\n".encode() + body)
    with pytest.raises(UnknownVersion, match=f"format version {VERSION + 1}"):
        sync_from_bucket(stale, bucket.url)


def test_commits_that_are_all_damaged_are_told(host: Host, bucket: Bucket) -> None:
    for number in commit_numbers(bucket):
        flip(bucket, commit_path(number))
    with pytest.raises(CorruptData, match="checksum") as caught:
        sync_from_bucket(host.run, bucket.url)
    assert caught.value.hint


@pytest.mark.parametrize(
    "lie",
    [
        {"term": 7},
        {"term": 0},
        {"token": "x" * 32},
        {"manifests": ()},
        {"manifests": "twice"},
        {"number": 3},
    ],
    ids=str,
)
def test_a_commit_that_contradicts_itself_is_passed_over(
    lie: dict[str, object], host: Host, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    newest = newest_commit(bucket)
    if lie.get("manifests") == "twice":
        lie = {"manifests": newest.manifests * 2}
    lying = msgspec.structs.replace(newest, **{"number": newest.number + 1, **lie})
    bucket.put(commit_path(newest.number + 1), pack_document("commit", lying))
    assert read_newest(bucket) == newest and "commit_skipped" in caplog.text
    again = Host(host.run, bucket.url)
    again.commit(3)
    again.ship()
    assert sorted(verify_bucket(bucket.url).valid) == [2, 3]


# ---------------------------------------------------------------------- objects


@pytest.mark.parametrize("damage", ["flip", "short", "gone", "index", "base"])
def test_an_old_base_that_is_damaged_costs_nothing_else(
    damage: str, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody could go on from the bucket any more, though its newest base was whole."""
    host = Host(tmp_path / "a", url, keep=3)
    host.commit(1, 2, 3)
    host.ship()
    names = {"index": f"parts/000000/{ondisk.INDEX}", "base": ondisk.BASE}
    name = names.get(damage, f"parts/000000/{ondisk.SLOTS}")
    there = objects_in(url)
    path = next(p for p in there.listing() if f"bases/{2:012d}/{name}" in p)
    data = there.read(path) or b""
    if damage == "gone":
        there.delete([path])
    else:
        there.put(path, data[:-9] if damage == "short" else data[:-1] + bytes([data[-1] ^ 1]))
    with caplog.at_level(logging.WARNING):
        other = Host(tmp_path / "b", url)
    assert load(other.run) == 3
    assert "base_not_fetched" in caplog.text and " step=2" in caplog.text


def test_the_newest_base_is_damaged(host: Host, bucket: Bucket, tmp_path: Path) -> None:
    there = objects_in(bucket.url)
    path = next(p for p in there.listing() if f"bases/{2:012d}/parts/000000/{ondisk.SLOTS}" in p)
    there.put(path, (there.read(path) or b"")[:-1] + b"?")
    assert load(Host(tmp_path / "b", bucket.url).run) == 1


def test_an_empty_part_of_a_log(host: Host, bucket: Bucket, tmp_path: Path) -> None:
    folder = f"terms/000001-{host.writer.manifest.token[:8]}/log/000000/000001-000000000002.log"
    for name in ("000000000000000", "000000000000000-000000000099"):
        bucket.put(f"{folder}/{name}", b"")
    assert load(Host(tmp_path / "b", bucket.url).run) == 2
    again = Host(host.run, bucket.url)
    assert not again.bucket_won, "an empty part leads to no step"
    assert bytes(bucket.read_part(f"{folder}/000000000000000", 0, 0)) == b""


def test_something_else_lies_where_the_terms_should(
    host: Host, bucket: Bucket, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "bucket" / "terms")
    (tmp_path / "bucket" / "terms").write_bytes(b"x")
    for work in (
        lambda: sync_from_bucket(tmp_path / "b", bucket.url),
        lambda: BaseShipper(bucket, host.run, 1, Throttle(0)).turn(),
    ):
        with pytest.raises(StoreError, match="terms"):
            work()


# ---------------------------------------------------------------------- a directory


def test_a_listing_follows_no_link(host: Host, bucket: Bucket, tmp_path: Path) -> None:
    before = bucket.listing()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "index.json").write_bytes(b"x")
    (tmp_path / "bucket" / "terms" / "000009-x").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "bucket" / "commits" / "000000000009.json").symlink_to(
        tmp_path / "elsewhere" / "index.json"
    )
    assert bucket.listing() == before
    assert bucket.listing("terms/000001") == {}
    with pytest.raises(CorruptData, match="symbolic link"):
        bucket.read("commits/000000000009.json")


def test_reading_makes_no_directory(tmp_path: Path) -> None:
    bucket = Bucket(f"file://{tmp_path}/typo/deeper")
    assert bucket.listing() == {} and bucket.read("x") is None
    bucket.delete(["x/y"])
    with pytest.raises(StoreError):
        verify_bucket(bucket.url)
    with pytest.raises(StoreError):
        bucket.read_part("x", 0, 5)
    assert not (tmp_path / "typo").exists()
    assert bucket.create("a/b", b"1") and bucket.read("a/b") == b"1"


def test_what_an_upload_that_was_killed_left_behind_goes(tmp_path: Path) -> None:
    bucket = Bucket(f"file://{tmp_path}/bucket")
    bucket.put("a/b", b"1")
    left = tmp_path / "bucket" / "a" / ".everystep-tmp-b-0123456789abcdef"
    left.write_bytes(b"half")
    assert bucket.listing() == {"a/b": 1}
    bucket.put("a/b", b"2")
    assert not left.exists()
    bucket.delete(["a/b"])
    assert not (tmp_path / "bucket" / "a").exists(), "an empty folder says nothing"
