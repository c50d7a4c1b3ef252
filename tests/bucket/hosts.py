"""A host that commits to its directory and ships to a bucket, without a trainer; as a process to be killed:

python -m bucket.hosts RUN URL FIRST LAST KEEP
"""

from __future__ import annotations

import sys
from pathlib import Path

import ondisk
from crash.writer import CENSUS, SIZES, content, continue_run, snapshot, version_of

from everystep.errors import EverystepError
from everystep.format.base import Point
from everystep.recover.find import find_newest
from everystep.store.bases import read_base
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.commits import read_newest
from everystep.store.bucket.fetch import fetch_documents
from everystep.store.bucket.objects import Objects
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.tiers import sync_from_bucket
from everystep.store.disk.meter import Throttle
from everystep.store.layout import name_of


class Host:
    def __init__(self, run: Path, url: str, keep: int = 2) -> None:
        """Attach: bring the newest here, claim a term."""
        self.run, self.url = run, url
        self.bucket_won = sync_from_bucket(run, url)
        self.writer = continue_run(run, keep)
        self.shipper = BaseShipper(Bucket(url), run, self.writer.manifest.term, Throttle(0))

    def commit(self, *steps: int) -> None:
        for step in steps:
            self.writer.commit(snapshot(step))
            self.writer.apply_retention()

    def ship(self) -> None:
        self.shipper.turn()


def load(run: Path) -> int:
    """The newest step that loads; every byte of it is compared."""
    found, _ = find_newest(run, None)
    assert found is not None, "nothing can be loaded"
    step = found.point.step
    seen = set()
    for t in found.tensors():
        expected = content(t.atom, t.slot, version_of(t.atom, step), SIZES[t.atom])
        assert bytes(t.data) == expected, t[:5]
        seen.add((t.atom, t.slot))
    assert len(seen) == 3 * len(SIZES) and found.census == CENSUS
    return step


def missing_in_bucket(url: str, folder: Path) -> list[str] | None:
    """What the newest commit names and the bucket does not hold; None if a newer one came meanwhile."""
    bucket = Bucket(url)
    commit = read_newest(bucket)
    if commit is None:
        return []
    try:
        lineage = fetch_documents(bucket, commit, folder)
        there = Objects.of_commit(bucket, commit).listing()
        wanted = {
            name_of(f): f.bytes for c in lineage.candidates for f in read_base(folder, c).files
        }
        lost = [path for path, size in wanted.items() if there.get(path) != size]
    except EverystepError as error:
        lost = [str(error)]
    now = read_newest(bucket)
    assert now is not None
    return lost if now.number == commit.number else None


def objects_in(url: str) -> Objects:
    """By the paths that they have in a directory."""
    bucket = Bucket(url)
    commit = read_newest(bucket)
    assert commit is not None
    return Objects.of_commit(bucket, commit)


def bases_in_bucket(url: str, folder: Path) -> set[Point]:
    bucket = Bucket(url)
    commit = read_newest(bucket)
    assert commit is not None
    return {c.point for c in fetch_documents(bucket, commit, folder).candidates}


def files_of(run: Path) -> dict[str, int]:
    """Of bases, by path."""
    found = [path for base in ondisk.base_dirs(run) for path in base.rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): path.stat().st_size for path in found}


def main() -> None:
    run, url, first, last, keep = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
    host = Host(run, url, keep)
    host.ship()
    print("claimed", flush=True)
    for step in range(first, last + 1):
        host.commit(step)
        host.ship()
        print(step, flush=True)


if __name__ == "__main__":
    main()
