"""Shared memory by descriptor: it vanishes with its last holder, however that one dies."""

from __future__ import annotations

import errno
import mmap
import os

from everystep.errors import NotEnoughMemory
from everystep.lane.limits import limit_behind, limit_bytes
from everystep.lane.memory import address_of, populate

_TOO_LITTLE = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT, errno.EAGAIN)


class SharedMemory:
    """One mapped region behind one descriptor. Owned by whoever made or received it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bytes = os.fstat(fd).st_size
        try:
            self.map = mmap.mmap(fd, self.bytes)
        except OSError as error:
            raise _refusal(error, f"map {self.bytes / 2**20:.1f} MiB of shared memory") from error
        self.view = memoryview(self.map)
        self.words = self.view.cast("Q")

    @classmethod
    def create(cls, size: int, name: str, directory: str | None = None) -> SharedMemory:
        """Memory that is really there: it is allocated now, because a hole would be a SIGBUS later."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        fd, place = _open(name, directory)
        try:
            _allocate(fd, size, on_disk=directory is not None)
            return cls(fd)
        except NotEnoughMemory:
            os.close(fd)
            raise
        except OSError as error:
            os.close(fd)
            if error.errno not in _TOO_LITTLE:
                raise
            what = f"allocate {size / 2**20:.1f} MiB for {name} in {place}"
            raise _refusal(error, what) from error

    def close(self) -> None:
        """Give the descriptor back; the pages go when the last holder has done so."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.words.release()
        try:
            self.view.release()
            self.map.close()
        except BufferError:
            pass  # somebody still looks at a slice: the mapping goes when that view does


def _refusal(error: OSError, what: str) -> NotEnoughMemory:
    """A limit of this process is told as such: more memory would not help."""
    limit = limit_behind(error.errno or 0)
    if limit is None:
        return NotEnoughMemory(
            f"{what}: {error.strerror}",
            hint="point tuning=Tuning(arena_dir=…) (or EVERYSTEP_ARENA_DIR) at a directory with room, "
            "or free host memory",
        )
    return NotEnoughMemory(
        f"{what}: {error.strerror}: this process is limited to {limit_bytes(limit) / 2**20:.1f} MiB by "
        f"{limit.name}",
        hint=f"raise it where the trainer is started ({limit.ulimit} shows it)",
    )


def _allocate(fd: int, size: int, *, on_disk: bool) -> None:
    """In memory, pages are made real through a mapping: `fallocate` would leave it to the first write to
    clear them, one by one. A file has its blocks allocated."""
    if on_disk:
        os.posix_fallocate(fd, 0, size)
        return
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as mapped, memoryview(mapped) as view:
        failed = populate(address_of(view), size)
    if failed == errno.EINVAL:  # an old kernel
        os.posix_fallocate(fd, 0, size)
    elif failed:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _open(name: str, directory: str | None) -> tuple[int, str]:
    if directory is not None:
        return _unnamed_file(directory), directory
    try:
        return os.memfd_create(f"everystep-{name}", os.MFD_CLOEXEC), "anonymous memory"
    except OSError:  # refused by an old kernel or a sandbox: the classic place instead
        return _unnamed_file("/dev/shm"), "/dev/shm"


def _unnamed_file(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotEnoughMemory(
            f"open an unnamed file in {directory}: {error.strerror}",
            hint="tuning=Tuning(arena_dir=…) must be a writable directory on a local file system",
        ) from error
