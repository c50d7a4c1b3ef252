"""One term as its writer sees it: commit a base, then drop what retention no longer keeps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from everystep.core.retention import Rules
from everystep.core.sizes import size
from everystep.errors import CorruptData, Fenced, NotEnoughDisk, StoreError
from everystep.format.base import Base, BaseEntry, Manifest, Point
from everystep.format.checks import check_base
from everystep.store.bases import read_base
from everystep.store.disk.files import RunPath
from everystep.store.disk.meter import Meter
from everystep.store.log import old_segments
from everystep.store.retention import (
    Plan,
    older_unpinned,
    plan_retention,
    plan_without,
    read_back,
    remove,
    remove_base,
    unreferenced,
)
from everystep.store.runs import (
    Known,
    Lineage,
    check_fence,
    claim_term,
    read_lineage,
    read_manifest,
    write_manifest,
)
from everystep.store.snapshot import Snapshot, new_bytes, write_base

log = logging.getLogger("everystep")


class TermWriter:
    """The only thing that writes to a run. Owned by one thread of one shadow."""

    def __init__(
        self,
        run: Path,
        continues: Point | None,
        rules: Rules,
        *,
        meter: Meter | None = None,
        known: Known | None = None,
        ended_log: Callable[[], tuple[RunPath, int] | None] = lambda: None,
    ) -> None:
        """`ended_log`: the newest segment of our own log and the step it ends with, if it grows no more."""
        self._run = run
        self._ended_log = ended_log
        self._rules = rules
        self._meter = meter or Meter()
        self._opened = time.monotonic()
        self.manifest: Manifest = claim_term(run, continues, rules, known=known)
        """What counts in our term; `previous` is the newest base of the run's lineage."""
        self.previous = self._newest_base()
        self._measure()

    def commit(self, snapshot: Snapshot) -> BaseEntry:
        """Write a base and make it count; on any failure it does not count, or it is there, whole, and is
        made durable by the next call."""
        check_fence(self._run, self.manifest.term)
        for entry in self.manifest.bases:
            if entry.step == snapshot.step:
                self._write(
                    self.manifest
                )  # the sync of it may have failed: what is lost then stays lost
                return entry
        remove_base(
            self._run, self.manifest.term, snapshot.step
        )  # leftovers of a write that failed
        if self._meter.limits.store_quota:
            self._make_room(snapshot)
        try:
            entry, base = write_base(
                self._run,
                self.manifest.run_id,
                self.manifest.term,
                snapshot,
                self.previous,
                self._meter,
            )
            self._check_readable(base)
            check_fence(self._run, self.manifest.term)
            try:
                bases = (*self.manifest.bases, entry)
                self._write(msgspec.structs.replace(self.manifest, bases=bases))
            finally:
                if entry in self.manifest.bases:
                    self.previous = base
        except OSError:
            if all(entry.step != snapshot.step for entry in self.manifest.bases):
                remove_base(self._run, self.manifest.term, snapshot.step)
            raise
        return entry

    def _check_readable(self, base: Base) -> None:
        """A base that no reader would take is not durable."""
        try:
            check_base(base, f"the base of step {base.step}")
        except CorruptData as error:
            remove_base(self._run, base.point.term, base.step)
            raise StoreError(
                f"commit to {self._run}: nobody could load what was written: {error}",
                hint="training goes on, and older bases stay; this is a fault of everystep: please report it",
            ) from error

    def close(self) -> None:
        """Nothing more is committed in this term, and nothing went wrong with it."""
        self._write(msgspec.structs.replace(self.manifest, closed=time.time()))

    def _newest_base(self) -> Base | None:
        for candidate in read_lineage(self._run).candidates:
            try:
                return read_base(self._run, candidate)
            except StoreError:
                continue
        return None

    def apply_retention(self) -> None:
        """Forget old bases in the manifest first, then remove the files nobody refers to.

        What a killed writer left half written goes too. Nothing is forgotten before the newest base has been
        read back.
        """
        lineage = self._own_lineage()
        plan = plan_retention(self._run, lineage, self._rules)
        if plan.drop or plan.slim:
            read_back(self._run, lineage.candidates[0], self._meter.tick)
        self.carry_out(plan)
        self._measure()

    def _measure(self) -> None:
        """Tell the meter how much room is left below the quota."""
        if self._meter.limits.store_quota:
            kept = read_lineage(self._run).candidates
            newest = kept[0].entry.new_bytes if kept else 0
            may_go = sum(c.entry.new_bytes for c in older_unpinned(self._run, kept))
            self._meter.measure(self._run, next_base=newest, may_go=may_go)

    def _make_room(self, snapshot: Snapshot) -> None:
        """Older bases go until this one fits below the quota, the oldest first. The newest stays, and so does
        what a tag pins."""
        quota, need = self._meter.limits.store_quota, new_bytes(snapshot, self.previous)
        checked = False
        while (used := self._meter.measure(self._run)) + need > quota:
            lineage = self._own_lineage()
            may_go = older_unpinned(self._run, lineage.candidates)
            if not may_go:
                raise NotEnoughDisk(
                    f"write a base of step {snapshot.step} to {self._run}: it takes {size(need)}, and "
                    f"{size(used)} of store_quota {size(quota)} are used by what has to stay",
                    hint="raise tuning=Tuning(store_quota=…), or remove tags that pin bases (everystep ls "
                    "shows them)",
                )
            if not checked:
                read_back(self._run, lineage.candidates[0], self._meter.tick)
                checked = True
            log.warning(
                "store_quota_reached run=%s quota=%d used=%d: the base of step %d goes early",
                *(self._run, quota, used, may_go[-1].entry.step),
            )
            self.carry_out(plan_without(self._run, lineage, self._rules, may_go[-1]))

    def carry_out(self, plan: Plan) -> int:
        """Do what was planned; returns how many bytes that freed.

        We write what counts no longer, and look for a newer term afterwards; whoever claims one makes its
        folder, and reads what counts afterwards. So either we see the claim and take back what we wrote, or
        the claim has seen what we wrote. Files of newer terms are never touched.
        """
        check_fence(self._run, self.manifest.term)  # reading back may have taken long
        before = self.manifest
        if plan.drop or plan.slim:
            self._write(_forgetting(before, plan))
        try:
            lineage = self._own_lineage()
            doomed = unreferenced(self._run, lineage.candidates, before.term)
            if plan.keep:
                doomed += old_segments(self._run, lineage, plan.log_begins_at)
                newest = self._ended_log()  # no segment behind it tells that it may go
                doomed += [newest[0]] if newest and newest[1] <= plan.log_begins_at else []
            check_fence(self._run, before.term)
        except Fenced:
            if self.manifest != before:
                self._write(before)
            raise
        return remove(doomed, self._check_ours)

    def _check_ours(self) -> None:
        """Before each file that is removed."""
        check_fence(self._run, self.manifest.term)
        self._meter.tick()

    def _own_lineage(self) -> Lineage:
        """As it was while the run was ours."""
        lineage = read_lineage(self._run)
        check_fence(self._run, self.manifest.term)
        return lineage

    def _write(self, manifest: Manifest) -> None:
        lived = time.monotonic() - self._opened
        manifest = msgspec.structs.replace(manifest, lived=lived, written=self._meter.total)
        try:
            write_manifest(self._run, manifest)
        except OSError:  # perhaps after it took its place: what is there counts, synced or not
            with contextlib.suppress(OSError, StoreError):
                self.manifest = read_manifest(self._run, manifest.term) or self.manifest
            raise
        self.manifest = manifest


def _forgetting(manifest: Manifest, plan: Plan) -> Manifest:
    ours = {c.entry.step for c in plan.keep if c.term == manifest.term}
    earlier = tuple(c.point for c in plan.drop if c.term != manifest.term)
    return msgspec.structs.replace(
        manifest,
        bases=tuple(entry for entry in manifest.bases if entry.step in ours),
        dropped=(*manifest.dropped, *earlier),
        slimmed=tuple(c.point for c in plan.keep if c.weights_only),
    )
