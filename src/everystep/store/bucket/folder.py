"""A directory that serves as a bucket. The bytes of an object are synced before it gets its name, and its
name is synced before the call returns: after a loss of power, no commit names an object that is missing.

Nothing below the directory is followed, and nothing but ordinary files is an object.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from everystep.errors import CorruptData
from everystep.store.disk.commit import write_document
from everystep.store.disk.files import (
    TEMPORARY_PREFIX,
    RunPath,
    files_below,
    make_folder,
    make_root,
    named,
    names_in,
    open_file,
    read_file,
    remove_file,
    remove_folder,
    replace_file,
    sync_folder,
    temporary_for,
)
from everystep.store.disk.once import put_once
from everystep.store.disk.stream import StreamWriter


class FolderBucket:
    """Only who writes makes the directory. May be used by several threads."""

    failures: tuple[type[Exception], ...] = ()  # beside those of the system
    denied: tuple[type[Exception], ...] = (PermissionError,)

    def __init__(self, folder: Path) -> None:
        self._root = RunPath(folder)

    def listing(self, below: str) -> dict[str, int]:
        found = files_below(self._at(below) if below else self._root)
        return {
            path.inside: size for path, size in found if not path.name.startswith(TEMPORARY_PREFIX)
        }

    def read(self, path: str, most: int) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return read_file(self._at(path), most)
        return None

    def read_part(self, path: str, start: int, end: int) -> memoryview:
        at = self._at(path)
        parts: list[bytes] = []
        fd = open_file(at)
        try:
            with named(at):
                while start < end and (part := os.pread(fd, end - start, start)):
                    parts.append(part)
                    start += len(part)
        finally:
            os.close(fd)
        return memoryview(b"".join(parts))

    def create(self, path: str, data: bytes) -> bool:
        at = self._ready(path)
        put_once(at, data)
        return False  # or ours: who reads it, sees it

    def put(self, path: str, data: bytes | memoryview) -> None:
        at = self._ready(path)
        self._remove_leftovers(at)
        write_document(at, data)

    def put_parts(self, path: str, parts: Iterator[memoryview]) -> None:
        at = self._ready(path)
        self._remove_leftovers(at)
        temporary = temporary_for(at)
        try:
            writer = StreamWriter(temporary)
            try:
                for part in parts:
                    writer.append(part)
                writer.finish()
            finally:
                writer.close()
            replace_file(temporary, at)
        except BaseException:
            remove_file(temporary)
            raise
        sync_folder(at.parent)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            at = self._at(path)
            remove_file(at)
            while (at := at.parent).names:
                remove_folder(at)  # an empty one says nothing, and makes every listing longer

    def _ready(self, path: str) -> RunPath:
        at = self._at(path)
        make_root(self._root.root)
        make_folder(at.parent, below=self._root)
        return at

    def _remove_leftovers(self, at: RunPath) -> None:
        """Of uploads of this object that were killed; only one writer puts it."""
        for name in names_in(at.parent):
            if name.startswith(f"{TEMPORARY_PREFIX}{at.name}-"):
                remove_file(at.beside(name))

    def _at(self, path: str) -> RunPath:
        names = tuple(path.split("/"))
        if not set(names).isdisjoint(("", ".", "..")):
            raise CorruptData(f"open {path!r} in {self._root}: it is no name of an object")
        return RunPath(self._root.root, names)
