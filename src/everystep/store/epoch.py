"""One epoch as its writer sees it: commit a base, then drop what retention no longer keeps."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import msgspec

from everystep.errors import CorruptData, StoreError
from everystep.format.base import BaseEntry, BaseIndex, Manifest, Point
from everystep.store import layout
from everystep.store.bases import Snapshot, read_index, write_base
from everystep.store.commit import crash_point
from everystep.store.log import drop_old_segments
from everystep.store.runs import Candidate, check_fence, claim_epoch, read_lineage, write_manifest


class EpochWriter:
    """The only thing that writes to a run. Owned by one thread of one shadow."""

    def __init__(self, run: Path, continues: Point | None, keep_last: int) -> None:
        self._run = run
        self._keep_last = keep_last
        self.manifest: Manifest = claim_epoch(run, continues)
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

        What a killed writer left half written goes too.
        """
        check_fence(self._run, self.manifest.epoch)
        lineage = read_lineage(self._run)
        candidates = lineage.candidates
        keep, drop = candidates[: self._keep_last], candidates[self._keep_last :]
        needed: set[str] = set()
        for candidate in keep:
            with contextlib.suppress(CorruptData):  # a damaged base needs nothing any more
                needed |= {file.path for file in read_index(self._run, candidate).files}
        if drop:
            self._forget(keep, drop)
        kept = {layout.base_dir(self._run, c.epoch, c.entry.step) for c in keep}
        for folder in layout.base_dirs(self._run):
            if folder not in kept:
                _remove_unreferenced(self._run, folder, needed)
        if keep:
            drop_old_segments(self._run, lineage, min(c.entry.step for c in keep))

    def _forget(self, keep: list[Candidate], drop: list[Candidate]) -> None:
        ours = {c.entry.step for c in keep if c.epoch == self.manifest.epoch}
        earlier = tuple(c.point for c in drop if c.epoch != self.manifest.epoch)
        manifest = msgspec.structs.replace(
            self.manifest,
            bases=tuple(entry for entry in self.manifest.bases if entry.step in ours),
            dropped=(*self.manifest.dropped, *earlier),
        )
        write_manifest(self._run, manifest)
        self.manifest = manifest


def _remove_unreferenced(run: Path, folder: Path, needed: set[str]) -> None:
    """Remove the files of a base that no longer counts, except those that a kept base refers to."""
    for path in folder.iterdir():
        if str(path.relative_to(run)) not in needed:
            path.unlink()
            crash_point("old_bases_half_removed")
    if not any(folder.iterdir()):
        folder.rmdir()
