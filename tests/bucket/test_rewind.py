"""Going back to an earlier step is a decision: what a bucket holds behind it does not undo it in silence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults.work import CENSUS, record, snapshot

from everystep.cli.rewind import rewind_to
from everystep.core.retention import Rules
from everystep.errors import UsageError
from everystep.format.base import Point
from everystep.format.log import census_digest
from everystep.recover.find import find_newest
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.commits import read_newest
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.ship_log import LogEnd, LogShipper
from everystep.store.bucket.tiers import sync_from_bucket, take
from everystep.store.disk.meter import Throttle
from everystep.store.log import LogWriter
from everystep.store.term import TermWriter

LINE = dict.fromkeys(range(40), 0)
KEEP = Rules(5)


class Trainer:
    """Goes on with a run by bases and log, and ships both."""

    def __init__(self, run: Path, url: str) -> None:
        self.run, self.url = run, url
        sync_from_bucket(run, url)
        found = find_newest(run, None)[0] if (run / "everystep.json").exists() else None
        self.writer = TermWriter(run, found.point if found else None, KEEP)
        manifest = self.writer.manifest
        self.log = LogWriter(run, manifest.run_id, manifest.term, census_digest(CENSUS))
        self.end: LogEnd | None = None

    def base(self, *steps: int) -> None:
        for step in steps:
            self.writer.commit(snapshot(step, LINE))

    def append(self, first: int, last: int) -> None:
        self.log.append([record(step, LINE) for step in range(first, last + 1)])
        self.end = LogEnd(*self.log.end, last)

    def ship(self) -> None:
        term = self.writer.manifest.term
        BaseShipper(Bucket(self.url), self.run, term, Throttle(0)).turn()
        if self.end is not None:
            LogShipper(Bucket(self.url), self.run, term, Throttle(0)).turn(self.end)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


@pytest.fixture
def first(tmp_path: Path, url: str) -> Trainer:
    """Bases 10 and 20, a log to 25, all of it in the bucket."""
    trainer = Trainer(tmp_path / "a", url)
    trainer.base(10, 20)
    trainer.append(11, 25)
    trainer.ship()
    return trainer


def newest(run: Path) -> Point:
    found = find_newest(run, None)[0]
    assert found is not None
    found.close()
    return found.point


def rewound(run: Path, step: int) -> None:
    assert rewind_to(run, step, lambda lost: None)["step"] == step


@pytest.mark.parametrize("step", [10, 15, 20, 23])
def test_a_rewind_is_not_undone_by_the_bucket(step: int, first: Trainer, tmp_path: Path) -> None:
    assert newest(first.run).step == 25
    rewound(first.run, step)
    for _ in range(2):
        assert not sync_from_bucket(first.run, first.url)
        assert newest(first.run).step == step
    again = Trainer(first.run, first.url)  # claims, and dies before it has written anything
    assert not sync_from_bucket(first.run, first.url) and newest(first.run).step == step
    again = Trainer(first.run, first.url)
    again.base(step + 1)
    assert not sync_from_bucket(first.run, first.url) and newest(first.run).step == step + 1
    again.ship()
    assert not sync_from_bucket(first.run, first.url)
    sync_from_bucket(tmp_path / "b", first.url)
    assert newest(tmp_path / "b").step == step + 1


def test_who_has_seen_only_what_was_rewound_follows(first: Trainer, tmp_path: Path) -> None:
    """Also when later terms have been claimed since."""
    other = tmp_path / "b"
    sync_from_bucket(other, first.url)
    rewound(first.run, 15)
    for step in (16, 17):
        again = Trainer(first.run, first.url)
        again.base(step)
        again.ship()
    assert sync_from_bucket(other, first.url) and newest(other).step == 17


def test_a_rewind_that_others_have_not_heard_of_asks(first: Trainer, tmp_path: Path) -> None:
    """Somebody goes on from what it passed over."""
    rewound(first.run, 15)
    other = Trainer(tmp_path / "b", first.url)
    other.base(26)
    other.ship()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"directory to step 15 in term 2.*to step 26"):
            sync_from_bucket(first.run, first.url)
        assert newest(first.run).step == 15
    take(first.run, first.url, "directory")
    assert newest(first.run).step == 15 and not sync_from_bucket(first.run, first.url)
    again = Trainer(first.run, first.url)
    again.base(16)
    again.ship()
    assert sync_from_bucket(other.run, other.url) and newest(other.run).step == 16, "it was decided"


def test_the_bucket_has_more_than_the_rewind_knew(first: Trainer) -> None:
    """Of a log whose end is lost in the directory."""
    assert first.end is not None
    segment, size = first.end.segment, first.end.bytes
    first.append(26, 27)
    first.ship()
    os.truncate(segment, size)
    rewound(first.run, 15)
    with pytest.raises(UsageError, match="each on its own"):
        sync_from_bucket(first.run, first.url)
    assert newest(first.run).step == 15


def test_a_decision_is_told_in_every_later_commit(first: Trainer) -> None:
    rewound(first.run, 15)
    token = first.writer.manifest.token
    for step in (16, 17, 18):
        again = Trainer(first.run, first.url)
        again.base(step)
        again.ship()
    commit = read_newest(Bucket(first.url))
    assert commit is not None
    ours = next(m for m in commit.manifests if m.term == commit.term)
    assert [(line.token, line.step) for line in ours.over] == [(token, 25)]
