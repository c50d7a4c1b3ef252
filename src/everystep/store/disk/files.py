"""Every file of a run is touched here, and nowhere else.

A run's directory is data from somewhere else: whoever made it may have put links, pipes or devices into it.
The run itself may be reached through a link. Below it every folder is opened from the one above and nothing
is followed, so that nothing outside the run is ever read, written or removed. What is no ordinary file is
refused by its name, before anything of it is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everystep.errors import CorruptData, NotARun, StoreError

TEMPORARY_PREFIX = ".everystep-tmp-"
_DOCUMENT_BYTES_MAX = 256 << 20  # an index has a checksum for every MiB: this is one of terabytes
_DEEPEST = 9  # folders in folders: nothing of ours lies as deep
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: an open must not block on a pipe; for an ordinary file it changes nothing
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HINTS = {
    errno.EACCES: "whoever does this needs the right to read it: ls -l, chmod, or another user",
    errno.ELOOP: "the links lead to each other: give the real directory",
    errno.ENAMETOOLONG: "check the path",
}
_HINT = "the disk or its connection fails: dmesg says more; nothing was changed, try again"
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, order=True, slots=True)
class RunPath:
    """A file or folder of a run: its directory, and the names below it."""

    root: Path
    names: tuple[str, ...] = ()

    def __truediv__(self, name: str) -> RunPath:
        return RunPath(self.root, (*self.names, name))

    @property
    def name(self) -> str:
        return self.names[-1]

    @property
    def parent(self) -> RunPath:
        return RunPath(self.root, self.names[:-1])

    @property
    def inside(self) -> str:
        """Its path below the run; the name of the same file in a bucket."""
        return "/".join(self.names)

    def beside(self, name: str) -> RunPath:
        return RunPath(self.root, (*self.names[:-1], name))

    def __fspath__(self) -> str:
        return str(self.root.joinpath(*self.names))

    def __str__(self) -> str:
        return self.__fspath__()


def temporary_for(path: RunPath, owner: str = "") -> RunPath:
    """A name beside it that nobody can have taken before us."""
    return path.beside(f"{TEMPORARY_PREFIX}{owner}{path.name}-{secrets.token_hex(8)}")


# ---------------------------------------------------------------------- folders


@contextlib.contextmanager
def _in_folder(path: RunPath) -> Iterator[int]:
    """A descriptor of the folder, each part of its path opened from the one before."""
    try:
        fd = os.open(path.root, _FOLDER & ~os.O_NOFOLLOW)
    except NotADirectoryError:
        raise NotARun(f"open run {path.root}: it is a file, expected a directory") from None
    try:
        for depth, name in enumerate(path.names, 1):
            below = _open_at(fd, RunPath(path.root, path.names[:depth]), name, _FOLDER)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _at(path: RunPath) -> Iterator[tuple[int, str]]:
    """The folder that a file lies in, and its name there. Errors carry the whole path."""
    with _in_folder(path.parent) as folder, named(path):
        yield folder, path.name


@contextlib.contextmanager
def named(path: RunPath) -> Iterator[None]:
    """Errors of descriptors carry the path, too."""
    try:
        yield
    except OSError as error:
        raise _named(error, path) from None


@contextlib.contextmanager
def readable(path: RunPath) -> Iterator[None]:
    """What the system refuses while this is read becomes one of our errors, but that it is not there."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(
            f"read {path}: {error.strerror}", hint=_HINTS.get(error.errno or 0, _HINT)
        ) from error


def _named(error: OSError, path: RunPath) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def _open_at(folder: int, path: RunPath, name: str, flags: int, mode: int = 0o666) -> int:
    """Open without following, and tell what it is if it is not what is expected."""
    try:
        return os.open(name, flags, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            _refuse_unexpected(path, found, folder=bool(flags & os.O_DIRECTORY))
        raise _named(error, path) from None


def _refuse_unexpected(path: RunPath, found: int, *, folder: bool) -> None:
    expected = stat.S_IFDIR if folder else stat.S_IFREG
    if stat.S_IFMT(found) != expected:
        kind = _KINDS.get(stat.S_IFMT(found), "a file")
        raise CorruptData(
            f"open {path}: it is {kind}, expected a {'folder' if folder else 'file'}",
            hint="only the run's own directory may be reached through a link: put the real thing there",
        )


def names_in(path: RunPath) -> list[str]:
    """What a folder holds, in order; nothing if there is none."""
    try:
        with readable(path), _in_folder(path) as fd:
            return sorted(os.listdir(fd))  # noqa: PTH208 - a descriptor has no path
    except FileNotFoundError:
        return []


def files_below(path: RunPath, deepest: int = _DEEPEST) -> Iterator[tuple[RunPath, int]]:
    """Every ordinary file in a folder and in those below it, and its size; none if there is no folder."""
    try:
        with _in_folder(path) as fd, os.scandir(fd) as entries:
            found = sorted((e.name, e.stat(follow_symlinks=False)) for e in entries)
    except FileNotFoundError:  # removed meanwhile, perhaps
        return
    for name, known in found:
        if stat.S_ISREG(known.st_mode):
            yield path / name, known.st_size
        elif stat.S_ISDIR(known.st_mode) and deepest:
            yield from files_below(path / name, deepest - 1)


def is_folder(path: RunPath) -> bool:
    try:
        with readable(path), _in_folder(path):
            return True
    except FileNotFoundError:
        return False


def make_folder(path: RunPath, *, below: RunPath) -> None:
    """Create it and what lies between; `below` has to be there: if it was moved, deleted or unmounted, fail,
    or a run would come back half empty. All names are synced."""
    chain = [
        RunPath(path.root, path.names[:n]) for n in range(len(below.names), len(path.names) + 1)
    ]
    for folder in chain[1:]:
        with contextlib.suppress(FileExistsError):
            claim_folder(folder)
    for folder in reversed(chain):
        sync_folder(folder)


def make_root(root: Path) -> None:
    """The directory itself and what lies above it, where that is not there. All names are synced."""
    if root.is_dir():
        return
    root.mkdir(parents=True, exist_ok=True)
    for parent in root.parents:
        with contextlib.suppress(PermissionError):
            sync_folder(RunPath(parent))


def claim_folder(path: RunPath) -> None:
    """Create one folder; FileExistsError if somebody else did."""
    with _at(path) as (folder, name):
        os.mkdir(name, 0o777, dir_fd=folder)


def remove_folder(path: RunPath) -> None:
    """If it is empty and there."""
    with contextlib.suppress(OSError), _at(path) as (folder, name):
        os.rmdir(name, dir_fd=folder)


def sync_folder(path: RunPath) -> None:
    with _in_folder(path) as fd, named(path):
        os.fsync(fd)


# ---------------------------------------------------------------------- files


def open_file(path: RunPath, flags: int = os.O_RDONLY) -> int:
    """A descriptor of an ordinary file that is there."""
    with _in_folder(path.parent) as folder:
        fd = _open_at(folder, path, path.name, flags | _FILE)
    try:
        _refuse_unexpected(path, os.fstat(fd).st_mode, folder=False)
    except BaseException:
        os.close(fd)
        raise
    return fd


def create_file(path: RunPath, flags: int = 0) -> int:
    """A descriptor of a file that was not there. The umask says who may read it, as everywhere in a run."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _at(path) as (folder, name):
        return os.open(name, flags, 0o666, dir_fd=folder)


def read_file(path: RunPath, most: int = _DOCUMENT_BYTES_MAX) -> bytes:
    """All of a small file. One that is larger than any of ours is not read."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CorruptData(f"read {path}: {size} bytes, expected at most {most}")
        with named(path):
            return file.read(size)  # room is made for all that is asked for


def look_at(path: RunPath) -> os.stat_result | None:
    """Size and times of an ordinary file; None if there is none."""
    try:
        with readable(path), _at(path) as (folder, name):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    _refuse_unexpected(path, found.st_mode, folder=False)
    return found


def bytes_of(path: RunPath) -> int:
    """How large it is, whatever it is; 0 if it is a folder or not there. For what is to be removed."""
    try:
        with _at(path) as (folder, name):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return 0 if stat.S_ISDIR(found.st_mode) else found.st_size


def size_of(path: RunPath) -> int:
    """0 if it is not there."""
    found = look_at(path)
    return found.st_size if found else 0


def modified_at(path: RunPath) -> float:
    """0 if it is not there."""
    found = look_at(path)
    return found.st_mtime if found else 0.0


def replace_file(old: RunPath, new: RunPath) -> None:
    """Atomically; both lie in one folder."""
    with _at(new) as (folder, name):
        os.replace(old.name, name, src_dir_fd=folder, dst_dir_fd=folder)


def move_out(path: RunPath, to: Path) -> None:
    """A folder of the run goes to a place beside it, on the same disk."""
    with _at(path) as (folder, name):
        os.rename(name, to, src_dir_fd=folder)


def link_file(old: RunPath, new: RunPath) -> None:
    """FileExistsError if the new name is taken; both lie in one folder."""
    with _at(new) as (folder, name):
        os.link(old.name, name, src_dir_fd=folder, dst_dir_fd=folder)


def remove_file(path: RunPath) -> None:
    """If it is there; what is in its place but a folder goes, and what a link points to stays."""
    gone = (FileNotFoundError, IsADirectoryError)
    with contextlib.suppress(*gone), _at(path) as (folder, name):
        os.unlink(name, dir_fd=folder)
