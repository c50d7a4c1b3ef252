"""The operations on a bucket, on a directory and on a server alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from everystep.errors import StoreError, UsageError
from everystep.store.bucket.client import PART_BYTES, Bucket

from .server import Proxy


def test_objects_come_back_as_they_were_put(url: str) -> None:
    bucket = Bucket(url)
    large = random.Random(1).randbytes(2 * PART_BYTES + 12345)

    def parts() -> Iterator[memoryview]:
        for at in range(0, len(large), PART_BYTES):
            yield memoryview(large)[at : at + PART_BYTES]

    bucket.put_parts("a/large", parts())
    bucket.put("a/small", b"small")
    assert bucket.listing() == {"a/large": len(large), "a/small": 5}
    assert bucket.listing("b") == {}
    assert bucket.read("a/large") == large and bucket.read("nothing") is None
    assert (
        bytes(bucket.read_part("a/large", PART_BYTES - 1, PART_BYTES + 9))
        == (large[PART_BYTES - 1 : PART_BYTES + 9])
    )
    bucket.delete(["a/small", "never/was", "a/large"])
    assert bucket.listing() == {}


def test_a_part_that_fails_leaves_no_object(url: str) -> None:
    bucket = Bucket(url)

    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(PART_BYTES))
        raise StoreError("the disk is gone")

    with pytest.raises(StoreError, match="the disk is gone"):
        bucket.put_parts("x", parts())
    assert bucket.listing() == {}


def test_of_many_creators_one_wins(url: str) -> None:
    bucket = Bucket(url)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: bucket.create("one", b"%d" % i), range(8)))
    assert made.count(True) == 1
    assert bucket.read("one") == b"%d" % made.index(True)


def test_a_lost_answer_is_not_taken_for_somebody_else(proxy: Proxy, s3_url: str) -> None:
    bucket = Bucket(s3_url)
    proxy.lost = 0.6
    for i in range(5):
        path = f"commit/{i}"
        try:
            assert bucket.create(path, b"mine"), "our own object was taken for another's"
        except StoreError:
            continue  # said, and tried again later
    proxy.heal()
    there = bucket.read("commit/0") is not None
    assert bucket.create("commit/0", b"another") is not there


def test_errors_say_what_and_where(proxy: Proxy, s3_url: str) -> None:
    proxy.refuses = True
    with pytest.raises(StoreError, match=f"put {s3_url}/x: .*503") as caught:
        Bucket(s3_url).put("x", b"1")
    assert caught.value.hint
    with pytest.raises(UsageError, match="ftp"):
        Bucket("ftp://host/path")
    proxy.refuses = False
    with pytest.raises(StoreError, match="list s3://no-such-bucket"):
        Bucket("s3://no-such-bucket/prefix").listing()
