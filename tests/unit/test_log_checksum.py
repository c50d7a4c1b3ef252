"""The checksum of a record's body, made by several threads."""

from __future__ import annotations

import multiprocessing
import os

import xxhash

from everystep.format.log import body_checksum

BODY = memoryview(os.urandom(20 << 20))


def test_it_is_what_the_format_says() -> None:
    pieces = [BODY[at : at + (4 << 20)] for at in range(0, len(BODY), 4 << 20)]
    digests = b"".join(xxhash.xxh3_64_intdigest(p).to_bytes(8, "big") for p in pieces)
    assert body_checksum(BODY) == xxhash.xxh3_64_intdigest(digests)
    small = BODY[:1000]
    told = xxhash.xxh3_64_intdigest(small).to_bytes(8, "big")
    assert body_checksum(small) == xxhash.xxh3_64_intdigest(told)
    assert body_checksum(BODY[:0]) == xxhash.xxh3_64_intdigest(b"")


def _check(expected: int) -> None:
    raise SystemExit(0 if body_checksum(BODY) == expected else 1)


def test_a_forked_process_has_threads_of_its_own() -> None:
    expected = body_checksum(BODY)
    child = multiprocessing.get_context("fork").Process(target=_check, args=(expected,))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
