"""What a shadow and a person do to a run's directory, drawn from a seed: bases, log, tags, retention,
rewinds, prunes, a bucket, new writers. Each step's bytes follow from its number and its branch.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from states import numbers_in, random_states

from everystep.cli.prune import prune_run
from everystep.cli.rewind import rewind_to
from everystep.core.census import Atom, Census, Mode, OptimizerSpec
from everystep.core.events import Edit, Seal
from everystep.core.retention import Rules
from everystep.core.tensors import TensorRef
from everystep.errors import EverystepError, NothingToRecover
from everystep.format.base import Point, SessionValues
from everystep.format.entry import frame_entry
from everystep.format.log import LoggedRecord, census_digest
from everystep.format.slot import pack_events
from everystep.recover.find import find_newest
from everystep.recover.point import RestorePoint
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.commits import read_newest
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.tiers import sync_from_bucket
from everystep.store.disk.meter import Throttle
from everystep.store.log import LogWriter
from everystep.store.runs import read_lineage
from everystep.store.snapshot import Snapshot
from everystep.store.tags import read_tags, remove_tag, set_tag
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run

SIZES = (9000, 64, 1000)
_ATOMS = tuple(Atom(f"layer.{i}", "uint8", (size,)) for i, size in enumerate(SIZES))
CENSUS = Census(
    _ATOMS, (OptimizerSpec("", "torch.optim.sgd:SGD", Mode.REPLAY, ((0, 1, 2),)),), "exact"
)
_EDITED = 2  # the atom that every logged step changes


@dataclass(frozen=True)
class Claim:
    """What counts for durable once an operation has returned."""

    step: int = -1  # -1: nothing
    tags: tuple[tuple[str, int], ...] = ()
    whole: bool = True  # nobody is removing the directory just then


@dataclass
class Work:
    """One life of a run. `instant` tells where in the disk's trace we are."""

    run: Path
    bucket: Path
    chance: random.Random
    instant: Callable[[], int]
    reads_failed: Callable[[], bool] = lambda: False  # since the operation began
    step: int = 0
    branch: int = 0  # a number for each line of history: what was rewound over is another's
    # of every step of the present line: the branch that it was made in
    made_in: dict[int, int] = field(default_factory=dict)
    claims: list[tuple[int, Claim]] = field(
        default_factory=list
    )  # and from which instant they hold
    history: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    shipped: list[tuple[int, Path]] = field(default_factory=list)  # what the bucket held since when

    def __post_init__(self) -> None:
        self._writer: TermWriter | None = None
        self._log: LogWriter | None = None
        self._rules = Rules(self.chance.choice([1, 2, 3]), keep_slots=self.chance.choice([0, 1]))
        self._based = self._logged = -1
        self.lost, self._shipped_step = False, -1  # the directory: the bucket has all there is
        self.claims.append((0, Claim()))

    def do_something(self) -> None:
        """One operation. Errors of the disk are what a shadow would tell of, and try again later."""
        if self._writer is None:
            work: Callable[[], None] = self._open
        else:
            work = self.chance.choices(
                [
                    *(self._base, self._append, self._tag, self._untag, self._rewind, self._prune),
                    *(self._reopen, self._ship, self._lose_directory),
                ],
                [5, 6, 1, 1, 1, 1, 1, 2, 0.5],
            )[0]
        try:
            work()
        except (OSError, EverystepError) as error:
            self.failed.append(f"{work.__name__}: {type(error).__name__}: {error}")
            self._logged = -1  # a gap, perhaps: the log is of no use until a base lies behind it
        self.done.append(f"{work.__name__} -> {self.step}")

    def _claim(self, **changes: Any) -> None:
        self.claims.append((self.instant(), replace(self.claims[-1][1], **changes)))

    def promised(self, instant: int) -> Claim:
        """What must be there if the power goes now."""
        return next(claim for since, claim in reversed(self.claims) if since <= instant)

    # ------------------------------------------------------------------ operations

    def _open(self) -> None:
        """A writer that goes on from what there is, as one that was started anew."""
        if self.lost:
            self.sync_from_bucket()
        found = newest(self)
        point = found.point if found else None
        if self.reads_failed():  # what cannot be read is passed over, as what has rotted
            self._claim(step=min(point.step if point else -1, self.claims[-1][1].step))
        self.made_in, self.step = {}, 0
        if found is not None:
            step, branch = numbers_in(found.session.rng)
            self.made_in, self.step = dict(self.history[branch, step]), step
        self.branch += 1  # what somebody may have done behind it is of another line
        self._writer = TermWriter(self.run, point, self._rules)
        manifest = self._writer.manifest
        self._log = LogWriter(self.run, manifest.run_id, manifest.term, census_digest(CENSUS))
        self._based = self._logged = self.step if found else -1

    def _next(self) -> int:
        self.step += 1
        self.made_in[self.step] = self.branch
        self.history[self.branch, self.step] = dict(self.made_in)
        return self.step

    def _base(self) -> None:
        assert self._writer is not None
        if self.chance.random() < 0.7 or self.step not in self.made_in:
            self._next()
        step = self.step
        try:
            self._writer.commit(snapshot(step, self.made_in))
        finally:
            if any(e.step == step for e in self._writer.manifest.bases):
                self._based = max(self._based, step)
        self._logged = self._based = step
        if self._log is not None:
            self._log.close()
        self._claim(step=step)
        self._writer.apply_retention()

    def _append(self) -> None:
        if self._log is None or self._logged != self.step or self._based < 0:
            return self._base()
        records = [
            record(self._next(), self.made_in) for _ in range(self.chance.choice([1, 1, 2, 3]))
        ]
        self._log.append(records)
        self._logged = self.step
        self._claim(step=self.step)
        return None

    def _tag(self) -> None:
        kept = [c.entry.step for c in read_lineage(self.run).candidates if not c.weights_only]
        if kept:
            name, step = self.chance.choice("abc"), self.chance.choice(kept)
            if name not in read_tags(self.run):
                set_tag(self.run, name, step)
                self._retag({**self._tags, name: step})

    def _untag(self) -> None:
        for name in list(read_tags(self.run))[:1]:
            self._retag(
                {n: s for n, s in self._tags.items() if n != name}
            )  # it may go from here on
            remove_tag(self.run, name)

    @property
    def _tags(self) -> dict[str, int]:
        return dict(self.claims[-1][1].tags)

    def _retag(self, tags: dict[str, int]) -> None:
        self._claim(tags=tuple(sorted(tags.items())))

    def _rewind(self) -> None:
        kept = [c.entry.step for c in read_lineage(self.run).candidates if not c.weights_only]
        if kept:
            step = self.chance.choice(kept)
            self._writer = self._log = None
            self._claim(
                step=min(step, self.claims[-1][1].step)
            )  # it may have happened from here on
            rewind_to(self.run, step, lambda lost: None)
            self._claim(step=step)

    def _prune(self) -> None:
        self._writer = self._log = None
        prune_run(self.run, {"keep_last": 1}, dry_run=False, force=True)

    def _ship(self) -> None:
        """Bases and log to the bucket; what it holds from here on is kept aside."""
        assert self._writer is not None
        bucket, term = Bucket(self.url), self._writer.manifest.term
        shipper = BaseShipper(bucket, self.run, term, Throttle(0))
        shipper.turn()
        if shipper.newest is not None:
            aside = self.bucket.with_name(f"bucket-{len(self.shipped)}")
            shutil.copytree(self.bucket, aside)
            self.shipped.append((self.instant(), aside))

    def bucket_at(self, instant: int, target: Path) -> bool:
        """What the bucket held then."""
        held = [aside for since, aside in self.shipped if since <= instant]
        if held:
            shutil.copytree(held[-1], target)
        return bool(held)

    @property
    def url(self) -> str:
        return f"file://{self.bucket}"

    def sync_from_bucket(self) -> None:
        sync_from_bucket(self.run, self.url)
        if self.lost:
            self.lost = False
            self._claim(step=self._shipped_step, whole=True)

    def _lose_directory(self) -> None:
        """The disk is exchanged: what the bucket has is all there is."""
        if not self.shipped:
            return
        self._reopen()
        commit = read_newest(Bucket(self.url))
        assert commit is not None
        self._shipped_step = max(e.step for m in commit.manifests for e in m.bases)
        self._claim(step=-1, tags=(), whole=False)
        self.lost = True
        shutil.rmtree(self.run)
        self.sync_from_bucket()

    def _reopen(self) -> None:
        if self._log is not None:
            self._log.close()
        self._writer = self._log = None


def content(atom: int, slot: str, step: int, made_in: dict[int, int], size: int) -> bytes:
    """The first atom never changes, so that later bases refer to earlier ones."""
    version = 0 if atom == 0 else step
    branch = made_in.get(version, 0)
    return hashlib.shake_128(f"{atom}/{slot}/{version}/{branch}".encode()).digest(size)


def snapshot(step: int, made_in: dict[int, int]) -> Snapshot:
    tensors = [
        TensorRef(atom, slot, "uint8", (size,), 0 if atom == 0 else step, memoryview(data))
        for atom, size in enumerate(SIZES)
        for slot in ("", "/momentum_buffer")
        for data in (content(atom, slot, step, made_in, size),)
    ]
    session = SessionValues(step, random_states(step, made_in[step]), b"", (b"",), ())
    return Snapshot(step, CENSUS, tensors, session, b"", 0)


def record(step: int, made_in: dict[int, int]) -> LoggedRecord:
    data = content(_EDITED, "", step, made_in, SIZES[_EDITED])
    edit = Edit(_EDITED, "", "uint8", (len(data),), 0, len(data), 0)
    seal = Seal(step, step - 1, random_states(step, made_in[step]), b"", (b"",), 0)
    return LoggedRecord(step, step - 1, memoryview(frame_entry(*pack_events([edit, seal]), data)))


def newest(work: Work) -> RestorePoint | None:
    try:
        return find_newest(work.run, None)[0]
    except EverystepError:
        if work.claims[-1][1].step >= 0:  # whoever attaches is told, and decides
            raise
    return None


# ---------------------------------------------------------------------- what is found afterwards


def problems(run: Path, work: Work, promised: Claim) -> list[str]:
    """What is wrong with what a machine finds that comes back."""
    if not (run / "everystep.json").exists():
        return [f"no run, promised was step {promised.step}"] if promised.step >= 0 else []
    told: list[str] = []
    try:
        found, _ = find_newest(run, None)
    except NothingToRecover as refusal:  # of a directory that was being removed
        return [str(refusal)] if promised.step >= 0 else []
    step = found.point.step if found else -1
    if step < promised.step:
        told.append(f"step {step}, promised was {promised.step} ({found and found.problems})")
    if found is not None:
        told += _wrong_bytes(found, work)
        found.close()
    if promised.whole:
        told += [f"verify: {problem}" for problem in verify_run(run).problems]
    there = {name: candidate.entry.step for name, candidate in read_tags(run).items()}
    missing = [(n, at) for n, at in promised.tags if there.get(n) != at]
    return told + [f"tag {name} at {there.get(name)}, promised was {at}" for name, at in missing]


def _wrong_bytes(found: RestorePoint, work: Work) -> list[str]:
    """Every byte of the state, and of the log behind it, is that of one line of history."""
    step, branch = numbers_in(found.session.rng)
    line = work.history.get((branch, step))
    if line is None or found.point.step != step:
        return [f"step {step} of branch {branch} at {found.point}, which was never made"]
    records = list(found.log)
    based = records[0].after if records else step
    told = [
        f"wrong bytes: atom {t.atom} {t.slot!r} of step {based}"
        for t in found.tensors()
        if bytes(t.data) != content(t.atom, t.slot, based, line, SIZES[t.atom])
    ]
    return told + [
        f"wrong bytes: record {r.step}"
        for r in records
        if bytes(r.body) != bytes(record(r.step, line).body)
    ]


__all__ = ["CENSUS", "Claim", "Point", "Work", "problems"]
