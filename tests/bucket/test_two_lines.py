"""Hosts that share a bucket and attach, train, go back, are fenced, restart and lose disks in any order: who
goes on has seen every durable step of directory and bucket, or is told which ones the other line has."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from faults.work import CENSUS, problems, record, snapshot
from faults.work import Claim as Promise
from faults.work import Work as History
from states import numbers_in

from everystep.cli.rewind import rewind_to
from everystep.core.retention import Rules
from everystep.errors import EverystepError, Fenced, UsageError
from everystep.format.log import census_digest
from everystep.recover.find import find_newest
from everystep.recover.point import RestorePoint
from everystep.store import layout
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.commits import commit_numbers, commit_path, read_newest
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.ship_log import LogEnd, LogShipper
from everystep.store.bucket.tiers import sync_from_bucket, take
from everystep.store.disk.meter import Throttle
from everystep.store.log import LogWriter
from everystep.store.reach import reachable
from everystep.store.runs import read_lineage, read_manifest
from everystep.store.term import TermWriter

INTERLEAVINGS = int(os.environ.get("EVERYSTEP_INTERLEAVINGS", "24"))
OPERATIONS = 30
Line = dict[int, int]  # of every step, in which branch of the history it was made


class World:
    """The history of all hosts, and the bucket between them."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.url = f"file://{folder / 'bucket'}"
        self.history = History(folder / "none", folder / "none", chance, lambda: 0)
        self.branches = 0
        # steps of a branch that somebody has decided against, or has gone back over
        self.passed_over: set[tuple[int, int]] = set()
        self.refused = 0
        self.hosts: list[Host] = []
        self.shipped: Line = {}  # what the bucket has to bring back

    def line_of(self, run: Path) -> Line:
        """What a directory brings back; every byte of it is that of one line."""
        try:
            found, _ = find_newest(run, None)
        except EverystepError:
            return {}
        return self._line(found)

    def _line(self, found: RestorePoint | None) -> Line:
        if found is None:
            return {}
        step, branch = numbers_in(found.session.rng)
        found.close()
        return self.history.history[branch, step]

    def counting(self, line: Line) -> Line:
        """Of a line, what nobody has passed over: until the one that did ships, the bucket has that too."""
        return dict(line.items() - self.passed_over)

    def line_of_bucket(self) -> Line:
        if read_newest(Bucket(self.url)) is None:
            return {}
        with tempfile.TemporaryDirectory(dir=self.folder) as aside:
            sync_from_bucket(Path(aside, "run"), self.url)
            return self.line_of(Path(aside, "run"))


class Host:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.run = world.folder / name
        self.line: Line = {}
        # what its directory has to bring back, by what was done there and not by what is found
        self.durable: Line = {}
        self.bases: list[int] = []  # of the line, oldest first
        self.rewound: set[tuple[int, int]] = set()  # steps, and has not shipped since
        self.heard = False  # the bucket has, as somebody decided for this directory
        self.writer: TermWriter | None = None
        self.keep = world.chance.choice([1, 2, 3])

    def attach(self) -> None:
        world = self.world
        self.writer = None
        mine, theirs = world.line_of(self.run), world.line_of_bucket()
        assert _holds(mine, self.durable), (
            f"{self.name} has lost steps: it finds {_end(mine)}, durable was {_end(self.durable)}"
        )
        counts = self.world.counting(world.shipped)
        assert _holds(theirs, counts), (
            f"the bucket has lost steps: it brings back {_end(theirs)}, shipped was {_end(counts)}"
        )
        try:
            sync_from_bucket(self.run, self.world.url)
        except UsageError as error:
            assert "each on its own" in str(error), error
            goes_on = _holds(mine, theirs) and not self._is_elsewhere()
            follows = _holds(theirs, mine) and not self.rewound
            assert not (goes_on or follows), f"refused in vain: {error}"
            assert f"the directory to step {max(mine)} " in str(error), (mine, error)
            world.refused += 1
            self._decide(mine, theirs)
            return
        self.line = dict(world.line_of(self.run))
        assert not self.line.items() & self.rewound, f"{self.name}: its rewind is undone"
        for known, what in ((mine, "its directory"), (theirs, "the bucket")):
            line = world.counting(known)
            assert _holds(self.line, line), (
                f"{self.name} goes on at {_end(self.line)} and has passed over {what} at {_end(line)}"
            )
        self._begin()

    def _is_elsewhere(self) -> bool:
        """Whether the bucket belongs to a writer that this directory has not heard of."""
        commit = read_newest(Bucket(self.world.url))
        assert commit is not None
        manifest = read_manifest(self.run, commit.term)
        return manifest is None or manifest.token != commit.token

    def _decide(self, mine: Line, theirs: Line) -> None:
        which = self.world.chance.choice(["directory", "bucket"])
        kept = take(self.run, self.world.url, which)  # type: ignore[arg-type]
        wins, loses = (mine, theirs) if which == "directory" else (theirs, mine)
        self.durable = dict(wins)
        if which == "bucket":
            self.rewound.clear()
        for (
            other
        ) in self.world.hosts:  # what was decided there is decided against, as far as it is known
            if other is not self and other.heard:
                other.rewound.clear()
        self.heard = True
        assert self.world.line_of(self.run) == wins and self.world.line_of(kept) == loses
        if which == "directory":
            self.world.shipped = {}  # until it ships
        self.world.passed_over |= set(loses.items()) - set(wins.items())
        shutil.rmtree(kept)

    def _begin(self) -> None:
        world = self.world
        world.branches += 1
        self.durable = dict(self.line)
        lineage = read_lineage(self.run) if self.line else None
        self.bases = sorted(c.entry.step for c in lineage.candidates) if lineage else []
        found = find_newest(self.run, None)[0] if self.line else None
        self.writer = TermWriter(self.run, found.point if found else None, Rules(self.keep))
        manifest = self.writer.manifest
        digest = census_digest(CENSUS)
        self.log = LogWriter(self.run, manifest.run_id, manifest.term, digest)
        self.based = self.logged = max(self.line) if self.line else -1
        bucket = Bucket(world.url)
        self.shipper = BaseShipper(bucket, self.run, manifest.term, Throttle(0))
        self.log_shipper = LogShipper(bucket, self.run, manifest.term, Throttle(0))
        self.end: LogEnd | None = None

    def train(self) -> None:
        assert self.writer is not None
        world, branch = self.world, self.world.branches * 10 + int(self.name)
        steps = range(
            max(self.line, default=0) + 1,
            max(self.line, default=0) + 1 + world.chance.choice([1, 2]),
        )
        for step in steps:
            self.line[step] = branch
            world.history.history[branch, step] = dict(self.line)
        if self.logged == steps[0] - 1 and self.based > 0 and world.chance.random() < 0.5:
            self.log.append([record(step, self.line) for step in steps])
            self.end = LogEnd(*self.log.end, steps[-1])
            self.logged = steps[-1]
        else:
            self.writer.commit(snapshot(steps[-1], self.line))
            self.log.close()
            self.based = self.logged = steps[-1]
            self.bases.append(steps[-1])
            self.writer.apply_retention()
            kept = {c.entry.step for c in read_lineage(self.run).candidates}
            assert kept >= set(self.bases[-self.keep :]), (
                f"{self.name} keeps {self.keep} of {self.bases}, and has {sorted(kept)}"
            )
        self.durable = dict(self.line)

    def ship(self) -> None:
        with contextlib.suppress(Fenced):  # it trains on, and keeps what it writes
            self.shipper.turn()
            if self.shipper.claimed:
                self.log_shipper.turn(self.end)
                self.world.shipped = dict(self.durable)
                self.rewound.clear()

    def rewind(self) -> None:
        """Go back to any step that can be had; the next attach goes on from there."""
        self.writer = None
        _, steps = reachable(self.run, read_lineage(self.run)) if self.durable else ([], set())
        if steps:
            step = self.world.chance.choice(sorted(steps))
            rewind_to(self.run, step, lambda lost: None)
            gone = {(s, branch) for s, branch in self.durable.items() if s > step}
            self.world.passed_over |= gone
            self.durable = dict(self.durable.items() - gone)
            self.rewound |= gone
            self.heard = False

    def lose(self) -> None:
        self.writer = None
        self.durable = {}
        self.rewound.clear()
        shutil.rmtree(self.run, ignore_errors=True)

    def do_something(self) -> None:
        if self.writer is None:
            self.attach()
            return
        operations = [self.train, self.ship, self.attach, self.lose, self.rewind]
        self.world.chance.choices(operations, [6, 4, 1.5, 0.3, 0.4])[0]()


def _holds(line: Line, other: Line) -> bool:
    """Whether a line has all steps of the other one, and goes on from there or ends there."""
    return all(line.get(step) == branch for step, branch in other.items())


def _end(line: Line) -> object:
    return (max(line), line[max(line)]) if line else "nothing"


def interleave(seed: int, folder: Path) -> tuple[World, list[Host]]:
    chance = random.Random(f"two lines {seed}")
    world = World(folder, chance)
    hosts = [Host(world, str(number)) for number in range(chance.choice([2, 2, 3]))]
    world.hosts = hosts
    for work in (hosts[0].attach, hosts[0].train, hosts[0].ship):
        work()  # from then on the bucket tells which run it is
    for _ in range(OPERATIONS):
        chance.choice(hosts).do_something()
    return world, hosts


@pytest.mark.parametrize("seed", range(INTERLEAVINGS))
def test_no_line_is_passed_over_in_silence(seed: int, tmp_path: Path) -> None:
    world, hosts = interleave(seed, tmp_path)
    for host in hosts:
        if host.run.exists():
            promise = Promise(max(host.durable, default=-1))
            assert _holds(world.line_of(host.run), host.durable)
            assert not problems(host.run, world.history, promise)


def test_interleavings_do_diverge(tmp_path: Path) -> None:
    """Or they would test nothing."""
    assert sum(interleave(seed, tmp_path / str(seed))[0].refused for seed in range(10)) >= 5


@pytest.mark.parametrize("which", ["directory", "bucket"])
def test_steps_that_are_lost_are_found(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the promise would be made of what is left."""
    attach = Host.attach

    def loses(host: Host) -> None:
        if which == "directory":
            for number in layout.term_numbers(host.run)[:1]:
                shutil.rmtree(layout.term_dir(host.run, number))
        else:
            numbers = commit_numbers(Bucket(host.world.url))
            Bucket(host.world.url).delete(map(commit_path, numbers[:1]))
        attach(host)

    monkeypatch.setattr(Host, "attach", loses)
    told = []
    for seed in range(5):
        with pytest.raises(AssertionError) as caught:
            interleave(seed, tmp_path / str(seed))
        told.append(str(caught.value))
    assert any("lost steps" in words for words in told), told
