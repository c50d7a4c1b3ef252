"""A directory serves as a bucket, and the machine that it lies on loses power: what was said to be there, is
there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.writer import snapshot
from faults.disk import Disk, Operation
from faults.power import build, survivors

from everystep.errors import EverystepError
from everystep.store.bucket.client import PART_BYTES, Bucket
from everystep.store.bucket.tiers import sync_from_bucket
from everystep.store.runs import read_lineage

from .hosts import Host, load, missing_in_bucket

SHIPMENTS, INSTANTS = 5, 12


def shipments(seed: int, folder: Path, *, forgets: bool | None = None) -> Iterator[str]:
    """What is wrong after any of INSTANTS losses of power. `forgets`: syncs of folders (True) or files that
    were forgotten."""
    chance = random.Random(f"power {seed}")
    (folder / "disk").mkdir(parents=True)
    url = f"file://{folder}/disk/bucket"
    with Disk(folder / "disk").watched() as disk:
        host = Host(folder / "run", url, keep=chance.choice([1, 2]))
        promised = [(0, -1)]
        for step in range(1, SHIPMENTS + 1):
            host.writer.commit(snapshot(step))
            host.writer.apply_retention()
            host.ship()
            promised.append((len(disk.trace), step))
    assert not disk.unseen, f"seed {seed}: written past the disk: {disk.unseen[0]}"
    trace = [
        Operation("nothing", 0) if o.kind == "sync" and disk.folders[o.node] is forgets else o
        for o in disk.trace
    ]
    for number in range(INSTANTS):
        instant = chance.choice([len(trace), chance.randrange(len(trace) + 1)])
        after = folder / f"after-{number}"
        build(survivors(trace, instant, chance), disk.folders, after)
        step = next(step for since, step in reversed(promised) if since <= instant)
        told = wrong(f"file://{after}/bucket", step, folder / f"fetched-{number}")
        yield from (f"seed {seed}, at {instant} of {len(trace)}: {line}" for line in told)


def wrong(url: str, step: int, folder: Path) -> Iterator[str]:
    try:
        if missing := missing_in_bucket(url, folder / "documents"):
            yield f"named and not there: {missing[0]}"
        sync_from_bucket(folder / "run", url)
        there = (folder / "run").exists() and read_lineage(folder / "run").candidates
    except EverystepError as error:
        yield str(error)
        return
    found = load(folder / "run") if there else -1  # else nothing but a claim
    if found < step:
        yield f"step {found}, promised was {step}"


@pytest.mark.parametrize("seed", range(4))
def test_what_was_shipped_outlives_the_power(seed: int, tmp_path: Path) -> None:
    assert not list(shipments(seed, tmp_path))


@pytest.mark.parametrize("forgets", [True, False], ids=["of folders", "of files"])
def test_a_sync_that_is_forgotten_is_found(forgets: bool, tmp_path: Path) -> None:
    assert any(
        told for seed in range(4) for told in shipments(seed, tmp_path / str(seed), forgets=forgets)
    )


def test_large_objects_are_synced_before_they_have_their_name(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(2 * PART_BYTES)
    (tmp_path / "disk").mkdir()
    with Disk(tmp_path / "disk").watched() as disk:
        bucket = Bucket(f"file://{tmp_path}/disk/bucket")
        bucket.put_parts(
            "a/large", iter([memoryview(data)[:PART_BYTES], memoryview(data)[PART_BYTES:]])
        )
    kinds = [operation.kind for operation in disk.trace]
    assert "sync" in kinds[kinds.index("write") : kinds.index("move")] and kinds[-1] == "sync"
    build(survivors(disk.trace, len(kinds), random.Random(2)), disk.folders, tmp_path / "after")
    assert (tmp_path / "after/bucket/a/large").read_bytes() == data
