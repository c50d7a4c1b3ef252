"""Folders that this user alone can enter, at places that every process of a run looks at in the same order.

The environment must not decide where they lie: a trainer, its restart and a command may differ in TMPDIR or
XDG_RUNTIME_DIR, and /run/user goes with the last login. EVERYSTEP_RUNTIME_DIR is set for all, or not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from everystep.errors import LaneError

PLACES = ("/tmp", "/dev/shm", "/var/tmp")


def roots() -> list[Path]:
    """Where meeting places may lie, the best first."""
    chosen = os.environ.get("EVERYSTEP_RUNTIME_DIR")
    if chosen:
        return [Path(os.path.realpath(chosen))]
    return [Path(place) / f"everystep-{os.getuid()}" for place in PLACES]


def usable_roots() -> list[Path]:
    """Those of them that are private, made if missing. Somebody else's folder or link is passed over: all
    processes of this user see the same one, and so go to the same next place."""
    usable, problems = [], []
    for root in roots():
        try:
            _have_root(root)
            usable.append(root)
        except (OSError, LaneError) as error:
            problems.append(str(error))
    if not usable:
        raise LaneError(
            f"no place for processes of a run to meet: {'; '.join(problems)}",
            hint="set EVERYSTEP_RUNTIME_DIR to a private directory, for every process of the run",
        )
    return usable


def _have_root(root: Path) -> None:
    chosen = bool(os.environ.get("EVERYSTEP_RUNTIME_DIR"))
    if not chosen:
        _check_parent(root.parent)
    with contextlib.suppress(FileExistsError):  # whatever it is: the check says
        root.mkdir(mode=0o700, parents=chosen)
    check_folder(root, private=not chosen)


def make_private(folder: Path) -> None:
    """Have a folder that only this user can enter, or raise."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_folder(folder, private=True)


def remake(folder: Path) -> None:
    """Have a run's meeting place where it was, if it was removed under us. Somebody else may have put his own
    in the place of its root meanwhile: then nothing is made in there."""
    _have_root(folder.parent)
    make_private(folder)


def check_place(folder: Path) -> None:
    """Raise if a run's meeting place, or the root that it lies in, is not ours any more; FileNotFoundError if
    it is not there."""
    check_folder(folder.parent, private=False)
    check_folder(folder, private=False)


def refuse_foreign(folder: Path, what: str) -> None:
    """Refuse before a shadow is asked or waited for. If the folder was removed and another user made it
    again, that user would answer instead of our shadow, which does not come back to it."""
    try:
        check_place(folder)
    except FileNotFoundError:
        pass  # it makes it again
    except (OSError, LaneError) as error:
        raise LaneError(f"{what}: {error}") from error


def check_folder(folder: Path, *, private: bool) -> None:
    """By descriptor, so that what is looked at is what was opened, and not what a link leads to."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EACCES):
            raise
        raise LaneError(f"{folder}: {_what_is(folder)}, expected a private folder") from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid():
            raise LaneError(f"{folder}: owned by user {found.st_uid}, expected {os.getuid()}")
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(found.st_mode)
            raise LaneError(f"{folder}: others may write to it (mode {mode:04o}), expected 0700")
        if private and stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(fd, 0o700)  # ours, and nobody else could put anything into it
    finally:
        os.close(fd)


def _what_is(path: Path) -> str:
    """In words, for one that could not be opened as a folder."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"it cannot be looked at ({error.strerror})"
    kind = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder"}
    return f"{kind.get(stat.S_IFMT(found.st_mode), 'a file')} of user {found.st_uid}"


def _check_parent(parent: Path) -> None:
    """In a folder that all may write to, only the sticky bit keeps others from exchanging ours."""
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise LaneError(f"{parent}: everybody may rename what lies in it (no sticky bit)")
