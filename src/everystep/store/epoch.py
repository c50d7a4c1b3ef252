"""One epoch as its writer sees it: commit a base, then drop what retention no longer keeps."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec

from everystep.core.retention import Rules
from everystep.errors import Fenced, StoreError
from everystep.format.base import BaseEntry, BaseIndex, Manifest, Point
from everystep.store import layout
from everystep.store.bases import Snapshot, read_index, write_base
from everystep.store.log import old_segments
from everystep.store.retention import Plan, plan_retention, read_back, remove, unreferenced
from everystep.store.runs import Lineage, check_fence, claim_epoch, read_lineage, write_manifest


class EpochWriter:
    """The only thing that writes to a run. Owned by one thread of one shadow."""

    def __init__(
        self, run: Path, continues: Point | None, rules: Rules, *, behind: int | None = None
    ) -> None:
        self._run = run
        self._rules = rules
        self._opened = time.monotonic()
        self.manifest: Manifest = claim_epoch(run, continues, rules, behind=behind)
        """What counts in our epoch; `previous` is the newest base of the run's lineage."""
        self.previous = self._newest_index()

    def commit(self, snapshot: Snapshot) -> BaseEntry:
        """Write a base and make it count; on any failure nothing has changed."""
        check_fence(self._run, self.manifest.epoch)
        for entry in self.manifest.bases:
            if entry.step == snapshot.step:
                return entry
        folder = layout.base_dir(self._run, self.manifest.epoch, snapshot.step)
        shutil.rmtree(folder, ignore_errors=True)  # leftovers of a write that failed
        try:
            entry, index = write_base(
                self._run, self.manifest.run_id, self.manifest.epoch, snapshot, self.previous
            )
            check_fence(self._run, self.manifest.epoch)
            manifest = msgspec.structs.replace(self.manifest, bases=(*self.manifest.bases, entry))
            self._write(manifest)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.previous = index
        return entry

    def close(self) -> None:
        """Nothing more is committed in this epoch, and nothing went wrong with it."""
        self._write(msgspec.structs.replace(self.manifest, closed=time.time()))

    def _newest_index(self) -> BaseIndex | None:
        for candidate in read_lineage(self._run).candidates:
            try:
                return read_index(self._run, candidate)
            except StoreError:
                continue
        return None

    def retain(self) -> None:
        """Forget old bases in the manifest first, then remove the files nobody refers to.

        What a killed writer left half written goes too. Nothing is forgotten before the newest base has been
        read back.
        """
        lineage = self._own_lineage()
        plan = plan_retention(self._run, lineage, self._rules)
        if plan.drop or plan.slim:
            read_back(self._run, lineage.candidates[0])
        self.carry_out(plan)

    def carry_out(self, plan: Plan) -> int:
        """Do what was planned; returns how many bytes that freed.

        We write what counts no longer, and look for a newer epoch afterwards; whoever claims one makes its
        folder, and reads what counts afterwards. So either we see the claim and take back what we wrote, or
        the claim has seen what we wrote. Files of newer epochs are never touched.
        """
        check_fence(self._run, self.manifest.epoch)  # reading back may have taken long
        before = self.manifest
        if plan.drop or plan.slim:
            self._write(_forgetting(before, plan))
        try:
            lineage = self._own_lineage()
            doomed = unreferenced(self._run, lineage.candidates, before.epoch)
            if plan.keep:
                doomed += old_segments(self._run, lineage, plan.log_begins_at)
            check_fence(self._run, before.epoch)
        except Fenced:
            if self.manifest != before:
                self._write(before)
            raise
        return remove(doomed, lambda: check_fence(self._run, before.epoch))

    def _own_lineage(self) -> Lineage:
        """As it was while the run was ours."""
        lineage = read_lineage(self._run)
        check_fence(self._run, self.manifest.epoch)
        return lineage

    def _write(self, manifest: Manifest) -> None:
        lived = time.monotonic() - self._opened
        manifest = msgspec.structs.replace(manifest, lived=lived)
        write_manifest(self._run, manifest)
        self.manifest = manifest


def _forgetting(manifest: Manifest, plan: Plan) -> Manifest:
    ours = {c.entry.step for c in plan.keep if c.epoch == manifest.epoch}
    earlier = tuple(c.point for c in plan.drop if c.epoch != manifest.epoch)
    return msgspec.structs.replace(
        manifest,
        bases=tuple(entry for entry in manifest.bases if entry.step in ours),
        dropped=(*manifest.dropped, *earlier),
        slimmed=tuple(c.point for c in plan.keep if c.weights_only),
    )
