"""One trainer per run on this host."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from everystep.errors import LaneError, RunBusy
from everystep.lane.place import remake

log = logging.getLogger(__name__)

_NAME = "trainer.lock"
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2): kind, whence, start, length, pid

FRESH_SECONDS = 300.0  # cleaners of temporary folders go by days
_LOOK_SECONDS = 1.0
_TAKEN_SECONDS = 5.0  # a command holds the lock for a moment; another trainer keeps it


class TrainerLock:
    """A POSIX lock: it dies with the process, and forked data loader workers do not inherit it. Its file may
    be removed under it (by a cleaner, by hand): `taken_by` notices and makes it again."""

    _held_here: ClassVar[dict[Path, TrainerLock]] = {}  # it does not exclude its own process

    def __init__(self, folder: Path, run: str, operation: str = "attach") -> None:
        self._folder, self._path = folder, folder / _NAME
        self.problem = ""  # why it could not be made again
        self._looked_at = self._touched_at = time.monotonic()
        self._missing_since: float | None = None
        self._end_holder: weakref.WeakMethod[Callable[[], None]] | None = None
        if self.held_in_this_process(folder) is not None:
            raise RunBusy(
                f"{operation} {run}: this process has attached the run already",
                hint="close that Run first, or give this one another run=",
            )
        fd = _take(self._path)
        if isinstance(fd, str):
            raise RunBusy(
                f"{operation} {run}: the run is held by {fd}",
                hint="stop that trainer first, or give this one another run=",
            )
        self._fd, self._pid = fd, os.getpid()
        self._held_here[folder] = self

    @classmethod
    def held_in_this_process(cls, folder: Path) -> TrainerLock | None:
        """Not what a process that was forked has inherited: there the kernel's lock speaks."""
        lock = cls._held_here.get(folder)
        return lock if lock is not None and lock._pid == os.getpid() else None

    def hold_for(self, end: Callable[[], None]) -> None:
        """`end`: a method that ends whoever holds the run, if a later attach of this process wants it."""
        self._end_holder = weakref.WeakMethod(end)

    @classmethod
    def end_earlier(cls, folder: Path) -> None:
        """Have the earlier holder in this process, if any, release the run. A holder that nobody refers to
        any more, as in a notebook after `run = None`, cannot be asked: its lock is closed."""
        lock = cls.held_in_this_process(folder)
        if lock is not None and lock._end_holder is not None:
            end = lock._end_holder()
            if end is not None:
                end()
            lock.close()

    def taken_by(self) -> str:
        """Who else holds the run now, if our lock file was removed or replaced and another process was
        quicker; called at every seal."""
        now = time.monotonic()
        if self._fd < 0 or now < self._looked_at + _LOOK_SECONDS:
            return ""
        self._looked_at = now
        if _is_at(self._fd, self._path):
            self._missing_since, self.problem = None, ""
            if now > self._touched_at + FRESH_SECONDS:
                self._touched_at = now
                os.utime(self._fd)
            return ""
        try:
            remake(self._folder)
            fd = _take(self._path)
        except (OSError, LaneError) as error:
            self._lost(f"the lock of the run cannot be made again: {error}")
            return ""
        if isinstance(fd, str):
            self._missing_since = self._missing_since or now
            return fd if now > self._missing_since + _TAKEN_SECONDS else ""
        log.warning("lock_made_again path=%s", self._path)
        os.close(self._fd)
        self._fd, self._missing_since, self.problem = fd, None, ""
        return ""

    def _lost(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("lock_lost path=%s %s", self._path, problem)
        self.problem = problem

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._held_here.pop(self._folder, None)


def is_held(folder: Path) -> bool:
    """Whether anybody holds a run there, this process included. The lock itself is not taken: holding it even
    for a moment would turn others away."""
    if TrainerLock.held_in_this_process(folder) is not None:
        return True  # known without opening its file: to close that would give up the lock
    ask = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        fd = os.open(folder / _NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, ask))
    except OSError:
        return False
    finally:
        os.close(fd)
    return bool(kind != fcntl.F_UNLCK)


def _take(path: Path) -> int | str:
    """A descriptor that holds the lock, or who holds it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            return holder
        if _is_at(fd, path):  # else it was removed before we had the lock
            break
        os.close(fd)
    text = f"pid {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    with contextlib.suppress(OSError):  # a full disk; the lock holds without it
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)
    return fd


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one that others find under this name."""
    try:
        there = path.lstat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(fd), there)
