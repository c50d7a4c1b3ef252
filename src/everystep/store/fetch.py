"""Brings what a bucket holds into a local directory: data first, the manifests that name it last.

A file gets its name once every chunk of it was right and it is synced, so that half of one never counts.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everystep.errors import CorruptData, StoreError
from everystep.format.base import RunDocument, StoredFile
from everystep.format.commit import Commit
from everystep.format.document import pack_document
from everystep.format.log import read_records
from everystep.store import layout
from everystep.store.bases import check_chunks, open_checked, read_index
from everystep.store.bucket import PART_BYTES, Bucket
from everystep.store.commit import make_dirs, sync_dir, write_document
from everystep.store.mapped import map_file
from everystep.store.runs import Candidate, Lineage, create_run, read_lineage, write_manifest
from everystep.store.ship_log import part_path, parts_by_segment

_THREADS = 8


def fetch_documents(bucket: Bucket, commit: Commit, folder: Path) -> Lineage:
    """Run document, manifests and indexes: enough to tell what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_manifests(commit, folder)
    lineage = read_lineage(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda c: _fetch_index(bucket, c, folder), lineage.candidates))
    return lineage


def _fetch_index(bucket: Bucket, candidate: Candidate, folder: Path) -> None:
    path = layout.base_dir(folder, candidate.epoch, candidate.entry.step) / layout.INDEX
    name = str(path.relative_to(folder))
    data = bucket.read(name)
    if data is not None:  # else whoever reads the index says so
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _write_manifests(commit: Commit, folder: Path) -> None:
    """Oldest first: until the newest is there, what counted before goes on counting. Tags before all
    of them: a base that they pin is never without them."""
    ensure_run(folder, commit.run)
    for tag in commit.tags:
        make_dirs(folder / layout.TAGS, below=folder)
        write_document(layout.tag_path(folder, tag.name), pack_document("tag", tag))
    for manifest in sorted(commit.manifests, key=lambda m: m.epoch):
        make_dirs(layout.epoch_dir(folder, manifest.epoch), below=folder)
        write_manifest(folder, manifest)


def ensure_run(folder: Path, document: RunDocument) -> None:
    """The directory says which run it is, also where that was lost or damaged."""
    try:
        create_run(folder, document)
    except CorruptData:
        write_document(folder / layout.RUN_DOCUMENT, pack_document("run", document))


class Fetcher:
    """Fetches into one local directory. `documents` is a folder with the bucket's documents."""

    def __init__(self, bucket: Bucket, documents: Path, run: Path) -> None:
        self._bucket, self._documents, self._run = bucket, documents, run
        self.bytes = 0

    def bases(self, candidates: Sequence[Candidate]) -> None:
        """What of them is not here, or not as it should be. All bytes of the newest are looked at."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for candidate in candidates:
                index = read_index(self._documents, candidate)
                for file in index.files:
                    if not self._is_here(file, every_byte=candidate is candidates[0]):
                        self._file(pool, file)
                self._index(candidate)

    def _is_here(self, file: StoredFile, *, every_byte: bool) -> bool:
        path = self._run / file.path
        try:
            if every_byte:
                open_checked(self._run, file)
            return path.stat().st_size == file.bytes
        except (OSError, StoreError):
            return False

    def _file(self, pool: ThreadPoolExecutor, file: StoredFile) -> None:
        path = self._run / file.path
        make_dirs(path.parent, below=self._run)
        with _new_file(path) as fd:

            def piece(at: int) -> None:
                _write(fd, read_piece(self._bucket, file, at), at)

            list(pool.map(piece, range(0, file.bytes, PART_BYTES)))
        self.bytes += file.bytes

    def _index(self, candidate: Candidate) -> None:
        folder = layout.base_dir(self._run, candidate.epoch, candidate.entry.step)
        try:
            read_index(self._run, candidate)
        except StoreError:
            source = layout.base_dir(self._documents, candidate.epoch, candidate.entry.step)
            make_dirs(folder, below=self._run)
            write_document(folder / layout.INDEX, (source / layout.INDEX).read_bytes())

    def log(self, lineage: Lineage) -> None:
        """Segments behind the oldest base, unless the local ones hold as much."""
        oldest = min((c.entry.step for c in lineage.candidates), default=0)
        epochs = {epoch for epoch, _ in lineage.path}
        found = parts_by_segment(self._bucket.listing("epochs"))
        ours = {name: parts for name, parts in found.items() if layout.epoch_of(name) in epochs}
        for name, parts in ours.items():
            behind = [n for n in ours if n > name and Path(n).parent == Path(name).parent]
            replaced = behind and layout.segment_after(Path(min(behind))) <= oldest
            if parts and not replaced and not _is_whole(self._run / name, sum(parts[-1])):
                self._segment(name, parts)

    def _segment(self, name: str, parts: list[tuple[int, int]]) -> None:
        path = self._run / name
        make_dirs(path.parent, below=self._run)
        with _new_file(path, better=_records) as fd:
            for at, size in parts:
                _write(fd, self._bucket.read_part(part_path(name, at), 0, size), at)
                self.bytes += size

    def manifests(self, commit: Commit) -> None:
        _write_manifests(commit, self._run)


def check_object(bucket: Bucket, file: StoredFile) -> None:
    for at in range(0, file.bytes, PART_BYTES):
        read_piece(bucket, file, at)


def read_piece(bucket: Bucket, file: StoredFile, at: int) -> memoryview:
    """PART_BYTES of a file, or what is left of it, checked."""
    part = bucket.read_part(file.path, at, min(at + PART_BYTES, file.bytes))
    check_chunks(part, at, file, f"read {bucket.url}/{file.path}")
    return part


def _is_whole(segment: Path, size: int) -> bool:
    """Whether a local segment has so many bytes and every record in it is right."""
    try:
        for _ in read_records(map_file(segment), str(segment)):
            pass
        return segment.stat().st_size >= size
    except (OSError, CorruptData):
        return False


def _records(segment: Path) -> int:
    count = 0
    with contextlib.suppress(CorruptData):
        for _ in read_records(map_file(segment), str(segment)):
            count += 1
    return count


def _write(fd: int, data: memoryview, at: int) -> None:
    while len(data):
        count = os.pwrite(fd, data, at)
        data, at = data[count:], at + count


@contextlib.contextmanager
def _new_file(path: Path, better: Callable[[Path], int] | None = None) -> Iterator[int]:
    """A descriptor to write to; the file takes its place when it is whole and synced, and better than the one
    that is there, if that is asked."""
    temporary = path.with_name(f"{_half_prefix()}{os.getpid()}-{path.name}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        os.fsync(fd)
        if better is None or not path.exists() or better(temporary) > better(path):
            temporary.replace(path)
            sync_dir(path.parent)
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


def remove_leftovers(run: Path) -> None:
    """What a fetch that was killed left behind."""
    prefix = _half_prefix()
    for path in run.rglob(f"{prefix}*"):
        if not Path("/proc", path.name.removeprefix(prefix).partition("-")[0]).exists():
            path.unlink(missing_ok=True)


def _half_prefix() -> str:
    """Of files that this host is fetching: the directory may be shared with others."""
    return f"{layout.TEMPORARY_PREFIX}{socket.gethostname()}-"
