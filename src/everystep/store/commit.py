"""How bytes become durable, in one place: data, sync, rename, sync the directory.

Every boundary has a name; a test kills the writer at each of them (EVERYSTEP_CRASH_AT=name).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from everystep.format.base import CHUNK_BYTES
from everystep.store.layout import TEMPORARY_PREFIX
from everystep.store.stream import StreamWriter

Turn = Callable[[int], None]
CRASH_POINTS = (
    "base_begun",
    "data_half_written",
    "data_written",
    "data_synced",
    "index_written",
    "manifest_written",
    "manifest_synced",
    "manifest_renamed",
    "old_bases_half_removed",
)
LOG_CRASH_POINTS = ("log_filled", "log_written", "log_synced")


def crash_point(name: str) -> None:
    """Die here if a test asked for it; otherwise nothing."""
    if os.environ.get("EVERYSTEP_CRASH_AT") == name:
        os.kill(os.getpid(), signal.SIGKILL)


def at_once(size: int) -> None:
    """Bytes that nobody counts wait for nothing."""


def write_blocks(
    path: Path, blocks: Iterable[bytes | memoryview], turn: Turn = at_once
) -> tuple[int, tuple[str, ...]]:
    """Stream blocks into a new file, sync it, and return its length and chunk checksums. `turn` returns when
    so many bytes may be written."""
    digests: list[str] = []
    chunk, filled = xxhash.xxh3_64(), 0
    writer = StreamWriter(path)
    try:
        for block in blocks:
            view = memoryview(block).cast("B")
            while len(view):
                part = view[: CHUNK_BYTES - filled]
                turn(len(part))
                writer.append(part)
                chunk.update(part)
                filled += len(part)
                view = view[len(part) :]
                if filled == CHUNK_BYTES:
                    digests.append(chunk.hexdigest())
                    chunk, filled = xxhash.xxh3_64(), 0
            crash_point("data_half_written")
        if filled:
            digests.append(chunk.hexdigest())
        crash_point("data_written")
        writer.finish()
    finally:
        writer.close()
    return writer.bytes, tuple(digests)


def write_document(path: Path, data: bytes) -> None:
    """Replace a small file atomically and durably. The umask says who may read it, as everywhere in a run."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        _write_all(fd, memoryview(data))
        crash_point("manifest_written")
        os.fsync(fd)
    finally:
        os.close(fd)
    crash_point("manifest_synced")
    temporary.replace(path)
    crash_point("manifest_renamed")
    sync_dir(path.parent)


def make_dirs(path: Path, *, below: Path) -> None:
    """Create a directory and sync every parent up to `below`, so that the names survive too."""
    path.mkdir(parents=True, exist_ok=True)
    for folder in (path, *path.parents):
        sync_dir(folder)
        if folder == below:
            return


def make_dirs_in(existing: Path, path: Path) -> None:
    """Create a directory below one that is there, synced. If that one was moved, deleted or unmounted, fail:
    a run must not come back half empty."""
    for folder in reversed([f for f in (path, *path.parents) if existing in f.parents]):
        folder.mkdir(exist_ok=True)
    for folder in (path, *path.parents):
        sync_dir(folder)
        if folder == existing:
            return


def sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view) :]
