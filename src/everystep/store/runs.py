"""A run's directory: opening it, claiming an epoch, and the lineage of bases that count."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from everystep.errors import CorruptData, Fenced, NotARun, StoreError, UnknownVersion
from everystep.format.base import BaseEntry, Manifest, Point, RunDocument
from everystep.format.document import pack_document, unpack_document
from everystep.store import layout
from everystep.store.commit import make_dirs, sync_dir, write_document


class Candidate(NamedTuple):
    """A committed base that belongs to the run's lineage."""

    epoch: int
    entry: BaseEntry

    @property
    def point(self) -> Point:
        return Point(self.epoch, self.entry.step)


class Lineage(NamedTuple):
    """Bases that count, newest first, and what was wrong on the way."""

    run_id: str
    candidates: list[Candidate]
    problems: list[str]
    path: tuple[tuple[int, int | None], ...] = ()  # epochs, oldest first, and the last step of each


def read_run(run: Path) -> RunDocument | None:
    """The run's own document; None if there is no run yet; NotARun if it is somebody else's folder."""
    path = run / layout.RUN_DOCUMENT
    if path.is_file():
        return unpack_document("run", path.read_bytes(), RunDocument, str(path))
    if run.exists() and not run.is_dir():
        raise NotARun(f"open run {run}: it is a file, expected a directory")
    ours = ("epochs", layout.TEMPORARY_PREFIX)
    if run.is_dir() and any(not entry.name.startswith(ours) for entry in run.iterdir()):
        raise NotARun(
            f"open run {run}: the directory holds other files and no {layout.RUN_DOCUMENT}",
            hint="give a new or empty directory as run=",
        )
    return None


def create_run(run: Path) -> RunDocument:
    """Make the directory a run if it is not one yet; of two racing creators one wins."""
    document = read_run(run)
    if document is None:
        run.mkdir(parents=True, exist_ok=True)
        for parent in run.parents:  # the names of those just made must be durable too
            with contextlib.suppress(PermissionError):
                sync_dir(parent)
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        data = pack_document("run", RunDocument(uuid.uuid4().hex, created))
        temporary = run / f"{layout.TEMPORARY_PREFIX}run-{os.getpid()}"
        write_document(temporary, data)
        try:
            os.link(temporary, run / layout.RUN_DOCUMENT)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        sync_dir(run)
        document = read_run(run)
        assert document is not None
    return document


def claim_epoch(run: Path, continues: Point | None) -> Manifest:
    """Take the next epoch number for ourselves by an atomic mkdir, and say what we continue."""
    run_id = identify(run)[0] or create_run(run).run_id
    make_dirs(run / "epochs", below=run)
    number = max(layout.epoch_numbers(run), default=0)
    while True:
        number += 1
        try:
            layout.epoch_dir(run, number).mkdir()
        except FileExistsError:
            continue
        break
    manifest = Manifest(
        run_id,
        number,
        continues,
        socket.gethostname(),
        os.getpid(),
        ancestors=_ancestors(run, continues),
        opened=time.time(),
    )
    write_manifest(run, manifest)
    sync_dir(run / "epochs")
    return manifest


def _ancestors(run: Path, point: Point | None) -> tuple[Point, ...]:
    try:
        before = read_manifest(run, point.epoch) if point else None
    except StoreError:
        return ()
    return (before.continues, *before.ancestors) if before and before.continues else ()


def write_manifest(run: Path, manifest: Manifest) -> None:
    path = layout.epoch_dir(run, manifest.epoch) / layout.MANIFEST
    write_document(path, pack_document("manifest", manifest))


def read_manifest(run: Path, epoch: int) -> Manifest | None:
    """None if the epoch was claimed but never opened."""
    path = layout.epoch_dir(run, epoch) / layout.MANIFEST
    if not path.is_file():
        return None
    manifest = unpack_document("manifest", path.read_bytes(), Manifest, str(path))
    if manifest.epoch != epoch:
        raise CorruptData(f"read {path}: it is the manifest of epoch {manifest.epoch}")
    return manifest


def check_fence(run: Path, epoch: int) -> None:
    """Raise if a newer epoch owns the run. The lineage rule ignores us then anyway; this says so."""
    newest = max(layout.epoch_numbers(run), default=0)
    if newest > epoch:
        raise Fenced(
            f"commit to {run} in epoch {epoch}: epoch {newest} owns the run now",
            hint="this trainer was replaced; stop it",
        )


def identify(run: Path) -> tuple[str | None, str | None]:
    """The run's id, and what is wrong with its document; every manifest repeats the id."""
    try:
        document = read_run(run)
        return (document.run_id if document else None), None
    except CorruptData as error:
        for number in layout.epoch_numbers(run):
            try:
                manifest = read_manifest(run, number)
            except StoreError:
                continue
            if manifest is not None:
                return manifest.run_id, str(error)
        raise


def read_lineage(run: Path) -> Lineage:
    """Follow the run from its newest epoch back through the points each one continues."""
    run_id, problem = identify(run)
    if run_id is None:
        raise NotARun(f"open run {run}: there is no run", hint="check the path")
    candidates: list[Candidate] = []
    problems = [problem] if problem else []
    dropped: set[Point] = set()
    limits: dict[int, int] | None = None  # newest step that counts, by epoch; None: no manifest yet
    path: tuple[tuple[int, int | None], ...] = ()
    for number in layout.epoch_numbers(run):
        if limits is not None and number not in limits:
            continue
        try:
            manifest = read_manifest(run, number)
        except UnknownVersion:
            raise
        except StoreError as error:
            problems.append(str(error))
            continue
        if manifest is None:
            continue
        if manifest.run_id != run_id:
            problems.append(f"epoch {number} of {run}: belongs to run {manifest.run_id}")
            continue
        dropped |= set(manifest.dropped)
        for entry in reversed(manifest.bases):
            if (limits is None or entry.step <= limits[number]) and Point(
                number, entry.step
            ) not in dropped:
                candidates.append(Candidate(number, entry))
        if limits is None:
            points = [manifest.continues, *manifest.ancestors] if manifest.continues else []
            limits = {point.epoch: point.step for point in points}
            path = (*((p.epoch, p.step) for p in reversed(points)), (number, None))
    return Lineage(run_id, candidates, problems, path)
