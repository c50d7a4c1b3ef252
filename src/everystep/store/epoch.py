"""One epoch as its writer sees it: commit a base, then drop what retention no longer keeps."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec

from everystep.core.retention import Rules
from everystep.errors import StoreError
from everystep.format.base import BaseEntry, BaseIndex, Manifest, Point
from everystep.store import layout
from everystep.store.bases import Snapshot, read_index, write_base
from everystep.store.log import drop_old_segments
from everystep.store.retention import Plan, plan_retention, read_back, remove, unreferenced
from everystep.store.runs import Lineage, check_fence, claim_epoch, read_lineage, write_manifest


class EpochWriter:
    """The only thing that writes to a run. Owned by one thread of one shadow."""

    def __init__(self, run: Path, continues: Point | None, rules: Rules) -> None:
        self._run = run
        self._rules = rules
        self.manifest: Manifest = claim_epoch(run, continues, rules)
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
            write_manifest(self._run, manifest)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.manifest, self.previous = manifest, index
        return entry

    def close(self) -> None:
        """Nothing more is committed in this epoch, and nothing went wrong with it."""
        self.manifest = msgspec.structs.replace(self.manifest, closed=time.time())
        write_manifest(self._run, self.manifest)

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
        check_fence(self._run, self.manifest.epoch)
        lineage = read_lineage(self._run)
        plan = plan_retention(self._run, lineage, self._rules)
        if plan.drop or plan.slim:
            read_back(self._run, lineage.candidates[0])
        self.carry_out(lineage, plan)

    def carry_out(self, lineage: Lineage, plan: Plan) -> int:
        """Do what was planned; returns how many bytes that freed."""
        if plan.drop or plan.slim:
            self._forget(plan)
        paths = unreferenced(self._run, plan.keep)
        freed = sum(path.stat().st_size for path in paths)
        remove(paths)
        if plan.keep:
            drop_old_segments(self._run, lineage, plan.log_begins_at)
        return freed

    def _forget(self, plan: Plan) -> None:
        ours = {c.entry.step for c in plan.keep if c.epoch == self.manifest.epoch}
        earlier = tuple(c.point for c in plan.drop if c.epoch != self.manifest.epoch)
        manifest = msgspec.structs.replace(
            self.manifest,
            bases=tuple(entry for entry in self.manifest.bases if entry.step in ours),
            dropped=(*self.manifest.dropped, *earlier),
            slimmed=tuple(c.point for c in plan.keep if c.weights_only),
        )
        write_manifest(self._run, manifest)
        self.manifest = manifest
