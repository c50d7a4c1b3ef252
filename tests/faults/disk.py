"""Every operation on files below a folder, seen and, if wanted, refused: what a disk is asked to do.

Patches the functions of `os` that write, and those that read as far as no mapping does. All of a run's files
are written through them, and a test sees to it that nothing is written past them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("open", "close", "dup", "write", "pwrite", "ftruncate", "fsync", "fdatasync")
NAMES += ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link")
NAMES += ("preadv", "listdir", "stat")


@dataclass(frozen=True)
class Operation:
    """One change or sync. `node` is the file or folder; entries of folders have a name and a target."""

    kind: str  # write | truncate | sync | unsynced | enter | leave | move
    node: int
    at: int = 0
    data: bytes = b""
    name: str = ""
    other: str = ""  # move: the name before
    target: int = 0


Before = Callable[
    [str, Any], int | None
]  # told the function and what it is about; may raise, wait, or cut a write


@dataclass
class Disk:
    """The trace of all that was done below `root`. Nodes are numbered; 0 is the root."""

    root: Path
    before: Before = lambda name, what: None
    trace: list[Operation] = field(default_factory=list)
    folders: dict[int, bool] = field(default_factory=lambda: {0: True})
    unseen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = Path(os.path.realpath(self.root))
        self._plain = {name: getattr(os, name) for name in NAMES}
        self._node_of: dict[tuple[int, int], int] = {self._key(str(self.root)): 0}
        self._fds: dict[int, int] = {}
        self._lock = threading.RLock()

    @contextmanager
    def watched(self) -> Iterator[Disk]:
        for name in NAMES:
            setattr(os, name, getattr(self, f"_{name}"))
        try:
            yield self
        finally:
            for name, plain in self._plain.items():
                setattr(os, name, plain)

    # ------------------------------------------------------------------ descriptors

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        whole = self._whole(path, dir_fd)
        if whole is None:
            with self._lock:  # a file object may have closed a descriptor of this number, unseen
                fd = int(self._plain["open"](path, flags, mode, dir_fd=dir_fd))
                self._fds.pop(fd, None)
            return fd
        makes = bool(flags & os.O_CREAT) and not os.path.lexists(whole)
        writes = makes or flags & (os.O_WRONLY | os.O_RDWR)
        self.before("open" if writes else "open to read", whole)
        with self._lock:
            fd = int(self._plain["open"](path, flags, mode, dir_fd=dir_fd))
            node = self._enter(whole) if makes else self._known(self._key(fd), whole)
            self._fds[fd] = node
        return fd

    def _close(self, fd: int) -> None:
        with self._lock:
            self._plain["close"](fd)
            self._fds.pop(fd, None)

    def _dup(self, fd: int) -> int:
        with self._lock:
            copy = int(self._plain["dup"](fd))
            if fd in self._fds:
                self._fds[copy] = self._fds[fd]
        return copy

    # ------------------------------------------------------------------ files

    def _write(self, fd: int, data: Any) -> int:
        return self._put(fd, data, None)

    def _pwrite(self, fd: int, data: Any, at: int) -> int:
        return self._put(fd, data, at)

    def _put(self, fd: int, data: Any, at: int | None) -> int:
        node = self._fds.get(fd)
        if node is None:
            args = (fd, data) if at is None else (fd, data, at)
            return int(self._plain["write" if at is None else "pwrite"](*args))
        room = self.before("write", data)
        data = memoryview(data).cast("B")[: room if room is not None else None]
        with self._lock:
            begin = os.lseek(fd, 0, os.SEEK_CUR) if at is None else at
            args = (fd, data) if at is None else (fd, data, at)
            count = int(self._plain["write" if at is None else "pwrite"](*args))
            self.trace.append(Operation("write", node, begin, bytes(data[:count])))
        return count

    def _ftruncate(self, fd: int, size: int) -> None:
        self._on(fd, "ftruncate", lambda node: Operation("truncate", node, size), size)

    def _fsync(self, fd: int) -> None:
        self._on(fd, "fsync", lambda node: Operation("sync", node))

    def _fdatasync(self, fd: int) -> None:
        self._on(fd, "fdatasync", lambda node: Operation("sync", node))

    def _on(self, fd: int, name: str, told: Callable[[int], Operation], *more: int) -> None:
        node = self._fds.get(fd)
        try:
            if node is not None:
                self.before(name, fd)
        except OSError:
            if (
                name != "ftruncate"
            ):  # what was not synced then, no later sync will bring to the disk
                self.trace.append(Operation("unsynced", node))
            raise
        with self._lock:
            self._plain[name](fd, *more)
            if node is not None:
                self.trace.append(told(node))

    # ------------------------------------------------------------------ what is only looked at

    def _preadv(self, fd: int, *more: Any) -> int:
        if fd in self._fds:
            self.before("preadv", fd)
        return int(self._plain["preadv"](fd, *more))

    def _listdir(self, path: Any = ".") -> Any:
        if path in self._fds:
            self.before("listdir", path)
        return self._plain["listdir"](path)

    def _stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        if dir_fd in self._fds:
            self.before("stat", self._whole(path, dir_fd))
        return self._plain["stat"](path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    # ------------------------------------------------------------------ names

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        whole = self._whole(path, dir_fd)
        if whole is not None:
            self.before("mkdir", whole)
        with self._lock:
            self._plain["mkdir"](path, mode, dir_fd=dir_fd)
            if whole is not None:
                self.folders[self._enter(whole)] = True

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("unlink", path, dir_fd)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("unlink", path, dir_fd)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._gone("rmdir", path, dir_fd)

    def _gone(self, name: str, path: Any, dir_fd: int | None) -> None:
        whole = self._whole(path, dir_fd)
        if whole is not None:
            self.before(name, whole)
        with self._lock:
            key = self._key(whole) if whole is not None and os.path.lexists(whole) else None
            self._plain[name](path, dir_fd=dir_fd)
            if whole is not None:
                folder, last = self._place(whole)
                self.trace.append(Operation("leave", folder, name=last))
                if key is not None and self._links(key, whole) == 0:
                    self._node_of.pop(key, None)  # its number may be used again

    def _rename(self, old: Any, new: Any, **given: int | None) -> None:
        self._moved("rename", old, new, **given)

    def _replace(self, old: Any, new: Any, **given: int | None) -> None:
        self._moved("replace", old, new, **given)

    def _moved(
        self,
        name: str,
        old: Any,
        new: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        before, after = self._whole(old, src_dir_fd), self._whole(new, dst_dir_fd)
        if after is not None:
            self.before("replace", after)
        with self._lock:
            self._plain[name](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if after is not None and before is not None:
                (folder, last), (source, first) = self._place(after), self._place(before)
                assert folder == source, "everystep renames within one folder"
                node = self._known(self._key(after), after)
                self.trace.append(Operation("move", folder, name=last, other=first, target=node))

    def _link(
        self,
        old: Any,
        new: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        whole = self._whole(new, dst_dir_fd)
        if whole is not None:
            self.before("link", whole)
        with self._lock:
            self._plain["link"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            if whole is not None:
                folder, last = self._place(whole)
                node = self._known(self._key(whole), whole)
                self.trace.append(Operation("enter", folder, name=last, target=node))

    # ------------------------------------------------------------------ what a path is

    def _whole(self, path: Any, dir_fd: int | None) -> str | None:
        """The path of an operation, if it lies below the root."""
        if isinstance(path, int):
            return None
        name = os.fsdecode(path)
        if dir_fd is not None and not name.startswith("/"):
            name = f"{Path(f'/proc/self/fd/{dir_fd}').readlink()}/{name}"
        whole = os.path.normpath(os.path.join(os.getcwd(), name))  # noqa: PTH109, PTH118
        return whole if f"{whole}/".startswith(f"{self.root}/") else None

    def _key(self, at: str | int) -> tuple[int, int]:
        found = os.fstat(at) if isinstance(at, int) else os.lstat(at)
        return found.st_dev, found.st_ino

    def _links(self, key: tuple[int, int], whole: str) -> int:
        """How many names are left of what just lost one: as far as is known, none."""
        parent = Path(whole).parent
        return sum(1 for path in parent.iterdir() if self._key(str(path)) == key)

    def _known(self, key: tuple[int, int], whole: str) -> int:
        if key not in self._node_of:
            self.unseen.append(whole)  # it was there before, or was made past us
            self._node_of[key] = self._next()
        return self._node_of[key]

    def _next(self) -> int:
        node = len(self.folders)
        self.folders[node] = False
        return node

    def _enter(self, whole: str) -> int:
        node = self._node_of[self._key(whole)] = self._next()
        folder, last = self._place(whole)
        self.trace.append(Operation("enter", folder, name=last, target=node))
        return node

    def _place(self, whole: str) -> tuple[int, str]:
        parent, _, last = whole.rpartition("/")
        return self._known(self._key(parent), parent), last
