"""Brings what a bucket holds into a local directory: data first, the manifests that name it last.

A file gets its name once every chunk of it was right and it is synced, so that half of one never counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everystep.errors import CorruptData, StoreError, UnknownVersion
from everystep.format.base import Base, RunDocument, StoredFile
from everystep.format.commit import Commit
from everystep.format.document import pack_document
from everystep.format.log import read_records
from everystep.store import layout
from everystep.store.bases import check_chunks, open_checked, read_base, read_document
from everystep.store.bucket.client import PART_BYTES, Bucket
from everystep.store.bucket.log_parts import LogPart, parts_by_segment
from everystep.store.bucket.objects import Objects
from everystep.store.disk.commit import write_document
from everystep.store.disk.files import (
    TEMPORARY_PREFIX,
    RunPath,
    create_file,
    look_at,
    make_folder,
    named,
    names_in,
    read_file,
    remove_file,
    replace_file,
    sync_folder,
    temporary_for,
)
from everystep.store.disk.mapped import map_file
from everystep.store.runs import Candidate, Lineage, create_run, read_lineage, write_manifest

log = logging.getLogger("everystep")

_THREADS = 8


def fetch_documents(bucket: Bucket, commit: Commit, folder: Path) -> Lineage:
    """Run document, manifests and indexes: enough to tell what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_manifests(commit, folder)
    lineage = read_lineage(folder)
    objects = Objects.of_commit(bucket, commit)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda c: _fetch_base(objects, c, folder), lineage.candidates))
    return lineage


def _fetch_base(objects: Objects, candidate: Candidate, folder: Path) -> None:
    """Its documents. Where one is missing or damaged, whoever reads it says so."""
    term, step = candidate.term, candidate.entry.step
    with contextlib.suppress(CorruptData, UnknownVersion):
        _fetch_document(objects, layout.document_path(folder, term, step))
        for part in read_document(folder, candidate).parts:
            _fetch_document(objects, layout.index_path(folder, term, step, part.rank))


def _fetch_document(objects: Objects, path: RunPath) -> None:
    data = objects.read(path.inside)
    if data is not None:
        make_folder(path.parent, below=RunPath(path.root))
        write_document(path, data)


def _write_manifests(commit: Commit, folder: Path) -> None:
    """Oldest first: until the newest is there, what counted before goes on counting. Tags before all
    of them: a base that they pin is never without them."""
    ensure_run(folder, commit.run)
    for tag in commit.tags:
        make_folder(layout.tags_dir(folder), below=RunPath(folder))
        write_document(layout.tag_path(folder, tag.name), pack_document("tag", tag))
    for manifest in sorted(commit.manifests, key=lambda m: m.term):
        make_folder(layout.term_dir(folder, manifest.term), below=RunPath(folder))
        write_manifest(folder, manifest)


def ensure_run(folder: Path, document: RunDocument) -> None:
    """The directory says which run it is, also where that was lost or damaged."""
    try:
        create_run(folder, document)
    except CorruptData:
        write_document(RunPath(folder) / layout.RUN_DOCUMENT, pack_document("run", document))


class Fetcher:
    """Fetches into one local directory. `documents` is a folder with the bucket's documents."""

    def __init__(self, objects: Objects, documents: Path, run: Path) -> None:
        self._objects, self._documents, self._run = objects, documents, run
        self.bytes = 0

    def bases(self, candidates: Sequence[Candidate], *, damaged: bool = False) -> None:
        """What of them is not here, or not as it should be. All bytes of the newest are looked at. `damaged`:
        those that are not whole there either are left out, unless none is."""
        problem: CorruptData | None = None
        whole = False
        with ThreadPoolExecutor(_THREADS) as pool:
            for candidate in candidates:
                try:
                    self._base(pool, candidate, every_byte=not whole)
                    whole = True
                except CorruptData as error:
                    if not damaged:
                        raise
                    problem = problem or error
                    log.warning(
                        "base_not_fetched run=%s step=%d: %s",
                        self._run,
                        candidate.entry.step,
                        error,
                    )
        if problem is not None and not whole:
            raise problem

    def _base(self, pool: ThreadPoolExecutor, candidate: Candidate, *, every_byte: bool) -> None:
        base = read_base(self._documents, candidate)
        for file in base.files:
            if not self._is_here(file, every_byte=every_byte):
                self._file(pool, file)
        self._describe(candidate, base)

    def _is_here(self, file: StoredFile, *, every_byte: bool) -> bool:
        try:
            if every_byte:
                open_checked(self._run, file)
            found = look_at(layout.file_path(self._run, file))
            return found is not None and found.st_size == file.bytes
        except (OSError, StoreError):
            return False

    def _file(self, pool: ThreadPoolExecutor, file: StoredFile) -> None:
        path = layout.file_path(self._run, file)
        make_folder(path.parent, below=RunPath(self._run))
        with _new_file(path) as fd:

            def piece(at: int) -> None:
                _write(fd, path, read_piece(self._objects, file, at), at)

            list(pool.map(piece, range(0, file.bytes, PART_BYTES)))
        self.bytes += file.bytes

    def _describe(self, candidate: Candidate, base: Base) -> None:
        """Its documents, once all that they name is here."""
        try:
            read_base(self._run, candidate)
        except StoreError:
            for path in layout.documents(self._run, base):
                make_folder(path.parent, below=RunPath(self._run))
                write_document(path, read_file(RunPath(self._documents, path.names)))

    def log(self, lineage: Lineage) -> None:
        """Segments behind the oldest base, unless the local ones hold as much."""
        oldest = min((c.entry.step for c in lineage.candidates), default=0)
        terms = {term for term, _ in lineage.path}
        found = parts_by_segment(self._objects.listing())
        ours = {place: parts for place, parts in found.items() if place.term in terms}
        for place, parts in ours.items():
            behind = [o for o in ours if o[:2] == place[:2] and o > place]
            replaced = behind and min(behind).after <= oldest
            path = place.path(self._run)
            if parts and not replaced and not _is_whole(path, parts[-1].end):
                self._segment(path, parts)

    def _segment(self, path: RunPath, parts: list[LogPart]) -> None:
        make_folder(path.parent, below=RunPath(self._run))
        with _new_file(path, better=_records) as fd:
            for part in parts:
                _write(fd, path, self._objects.read_part(part.path(path), 0, part.size), part.at)
                self.bytes += part.size

    def manifests(self, commit: Commit) -> None:
        _write_manifests(commit, self._run)


def check_object(objects: Objects, file: StoredFile) -> None:
    for at in range(0, file.bytes, PART_BYTES):
        read_piece(objects, file, at)


def read_object(objects: Objects, file: StoredFile) -> bytes:
    """All of a small file, checked."""
    return b"".join(read_piece(objects, file, at) for at in range(0, file.bytes, PART_BYTES))


def read_piece(objects: Objects, file: StoredFile, at: int) -> memoryview:
    """PART_BYTES of a file, or what is left of it, checked."""
    name = layout.name_of(file)
    part = objects.read_part(name, at, min(at + PART_BYTES, file.bytes))
    check_chunks(part, at, file, f"read {objects.url}/{name}")
    return part


def _is_whole(segment: RunPath, size: int) -> bool:
    """Whether a local segment has so many bytes and every record in it is right."""
    try:
        data = map_file(segment)
        for _ in read_records(data, str(segment)):
            pass
        return len(data) >= size
    except (OSError, CorruptData):
        return False


def _records(segment: RunPath) -> int:
    count = 0
    with contextlib.suppress(CorruptData):
        for _ in read_records(map_file(segment), str(segment)):
            count += 1
    return count


def _write(fd: int, path: RunPath, data: memoryview, at: int) -> None:
    with named(path):
        while len(data):
            count = os.pwrite(fd, data, at)
            data, at = data[count:], at + count


@contextlib.contextmanager
def _new_file(path: RunPath, better: Callable[[RunPath], int] | None = None) -> Iterator[int]:
    """A descriptor to write to; the file takes its place when it is whole and synced, and better than the one
    that is there, if that is asked."""
    temporary = temporary_for(path, f"{_host()}{os.getpid()}-")
    fd = create_file(temporary)
    try:
        yield fd
        with named(path):
            os.fsync(fd)
        if better is None or look_at(path) is None or better(temporary) > better(path):
            replace_file(temporary, path)
            sync_folder(path.parent)
    finally:
        os.close(fd)
        remove_file(temporary)


def remove_leftovers(run: Path) -> None:
    """What a fetch that was killed left behind."""
    prefix = f"{TEMPORARY_PREFIX}{_host()}"
    logs = [layout.log_dir(run, term) for term in layout.term_numbers(run)]
    bases = [folder for _, folder in layout.base_dirs(run)]
    parts = [part for base in bases for part in layout.part_dirs(base)]
    for folder in (*logs, *bases, *parts):
        for name in names_in(folder):
            pid = name.removeprefix(prefix).partition("-")[0]
            if name.startswith(prefix) and not Path("/proc", pid).exists():
                remove_file(folder / name)


def _host() -> str:
    """In the names of files that this host is fetching: the directory may be shared with others."""
    return f"{re.sub(r'[^A-Za-z0-9]', '', socket.gethostname())[:64]}-"
