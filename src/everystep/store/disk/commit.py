"""How bytes become durable, in one place: data, sync, rename, sync the folder.

Every boundary has a name; a test kills the writer at each of them (EVERYSTEP_CRASH_AT=name).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

import xxhash

from everystep.format.base import CHUNK_BYTES
from everystep.store.disk.files import (
    RunPath,
    create_file,
    named,
    remove_file,
    replace_file,
    sync_folder,
    temporary_for,
)
from everystep.store.disk.stream import StreamWriter

Turn = Callable[[int], None]
CRASH_POINTS = (
    "base_begun",
    "data_half_written",
    "data_written",
    "data_synced",
    "index_written",
    "base_written",
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
    path: RunPath, blocks: Iterable[bytes | memoryview], turn: Turn = at_once
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


def write_document(path: RunPath, data: bytes | memoryview) -> None:
    """Replace a small file atomically and durably."""
    temporary = write_temporary(path, data)
    try:
        replace_file(temporary, path)
    except OSError:
        remove_file(temporary)
        raise
    crash_point("manifest_renamed")
    sync_folder(path.parent)


def write_temporary(path: RunPath, data: bytes | memoryview) -> RunPath:
    """The same under a name of its own, synced."""
    temporary = temporary_for(path)
    fd = create_file(temporary)
    try:
        with named(temporary):
            _write_all(fd, memoryview(data))
            crash_point("manifest_written")
            os.fsync(fd)
    except OSError:
        remove_file(temporary)
        raise
    finally:
        os.close(fd)
    crash_point("manifest_synced")
    return temporary


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view) :]
