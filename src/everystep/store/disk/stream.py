"""Large files, written past the page cache: one buffer fills and is hashed while another is written.

Direct I/O wants aligned memory, lengths and offsets. Where a file system refuses it, the same buffers go
through the page cache instead.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from everystep.store.disk.files import RunPath, create_file, named, remove_file

BUFFER_BYTES = 16 << 20  # `everystep bench copy` measures which size a disk likes
DEPTH = 5  # buffers: one is filled, two are written, one waits, so that the disk never does; one is held
_WRITERS = 2
BLOCK_BYTES = 4096
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


class StreamWriter:
    """A new file that grows at its end. Owned by one thread; others write for it."""

    def __init__(
        self, path: RunPath, *, buffer_bytes: int = BUFFER_BYTES, depth: int = DEPTH
    ) -> None:
        # memory first: what may be refused must not leave a descriptor behind
        self._free = deque(memoryview(mmap.mmap(-1, buffer_bytes)) for _ in range(depth))
        self._path = path
        self._fd, self.direct = _open_direct(path)
        self._writing: deque[tuple[Future[None], memoryview]] = deque()
        self._thread = ThreadPoolExecutor(_WRITERS, "everystep-write")
        self._current, self._filled = self._free.popleft(), 0
        self._held: tuple[memoryview, int, memoryview] | None = None
        self._hole = False  # in the current buffer, or in the one that is held
        self._written = 0
        self.bytes = 0

    def append(self, data: memoryview) -> None:
        while len(data):
            part = data[: len(self._current) - self._filled]
            self._current[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self.bytes += len(part)
            data = data[len(part) :]
            if self._filled == len(self._current):
                self._submit()

    def leave_hole(self, size: int) -> Callable[[bytes], None] | None:
        """Room for bytes that are not known yet: what comes behind them can be written already. Returns how
        they are put there, once, before anything is drained; None: there is no room for them together."""
        room = self._current[self._filled : self._filled + size]
        if len(room) < size or self._hole:
            return None
        self._hole = True
        self.append(memoryview(bytes(size)))

        def fill(data: bytes) -> None:
            assert self._hole, "a hole is filled once"
            room[:] = data
            self._hole = False
            if self._held is not None:
                held, self._held = self._held, None
                self._write_beside(*held)

        return fill

    def drain(self) -> None:
        """Everything was written when this returns, filled up with zeros to a whole block; not synced yet."""
        assert not self._hole, "a hole is filled before anything is drained"
        self.append(memoryview(bytes(-self.bytes % BLOCK_BYTES)))
        if self._filled:
            self._submit()
        while self._writing:
            self._await_oldest()

    def sync(self) -> None:
        """Everything that was drained is on the disk when this returns."""
        with named(self._path):
            os.fdatasync(self._fd)

    @property
    def links(self) -> int:
        """How many names the file has; 0: nobody will find it again."""
        return self.stat.st_nlink

    @property
    def stat(self) -> os.stat_result:
        return os.fstat(self._fd)

    def invalidate(self, at: int) -> None:
        """Nothing that begins at this block can be read any more. It is not cut off: somebody may have it
        mapped."""
        self._thread.shutdown()
        self._write(memoryview(mmap.mmap(-1, BLOCK_BYTES)), at)
        self.sync()

    def finish(self) -> None:
        """Everything is on the disk when this returns, and nothing behind it."""
        size = self.bytes
        self.drain()
        self.bytes = size
        with named(self._path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)

    def close(self) -> None:
        self._thread.shutdown()
        os.close(self._fd)

    def _submit(self) -> None:
        part = self._current[: self._filled], self._written, self._current
        self._written += self._filled
        self._filled = 0
        if self._hole and self._held is None:
            self._held = part
        else:
            self._write_beside(*part)
        if not self._free:
            self._await_oldest()
        self._current = self._free.popleft()

    def _write_beside(self, data: memoryview, at: int, buffer: memoryview) -> None:
        self._writing.append((self._thread.submit(self._write, data, at), buffer))

    def _await_oldest(self) -> None:
        job, buffer = self._writing.popleft()
        self._free.append(buffer)
        job.result()

    def _write(self, data: memoryview, at: int) -> None:
        with named(self._path):
            if not _write_at(self._fd, data, at, direct=self.direct):
                self.direct = False  # `&=` would put back what another thread has read before


def _write_at(fd: int, data: memoryview, at: int, *, direct: bool) -> bool:
    """Write all of it; True: direct writes still work. `direct` is passed by value, because another thread
    may find at the same time that they do not."""
    while len(data):
        try:
            count = os.pwrite(fd, data, at)
        except OSError as error:
            if not direct or error.errno not in REFUSED:
                raise
            direct = go_buffered(fd)
            continue
        data, at = data[count:], at + count
        if direct and len(data) % BLOCK_BYTES:
            direct = go_buffered(fd)  # a short write left the grid
    return direct


def go_buffered(fd: int) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return False


def _open_direct(path: RunPath) -> tuple[int, bool]:
    try:
        return create_file(path, os.O_DIRECT), True
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        remove_file(path)  # a refused direct open may leave an empty file
        return create_file(path), False
