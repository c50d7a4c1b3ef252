"""A small file that of several racing writers exactly one puts there, whole; the others find it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from pathlib import Path

from everystep.errors import StoreError
from everystep.store.commit import sync_dir, write_document
from everystep.store.layout import TEMPORARY_PREFIX

log = logging.getLogger("everystep")

_LOCKED_SECONDS_MAX = 10.0
_LOOK_SECONDS = 0.02


def put_once(path: Path, data: bytes) -> None:
    """It is there when this returns, ours or that of another. A hard link cannot replace a file; where links
    are refused (some network file systems, SELinux), a lock file lets one writer in at a time."""
    temporary = path.with_name(
        f"{TEMPORARY_PREFIX}{path.name}-{socket.gethostname()}-{os.getpid()}-new"
    )
    write_document(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        log.warning("hard_link_refused path=%s error=%s: a lock file is used", path, error)
        _put_locked(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_dir(path.parent)


def _put_locked(temporary: Path, path: Path) -> None:
    lock = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-lock")
    deadline = time.monotonic() + _LOCKED_SECONDS_MAX
    while not path.exists():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            try:
                if not path.exists():  # else somebody was let in before us
                    temporary.replace(path)
            finally:
                lock.unlink(missing_ok=True)
            return
        if time.monotonic() > deadline:
            raise StoreError(
                f"create {path}: {lock.name} is there for more than {_LOCKED_SECONDS_MAX:.0f} s",
                hint=f"whoever made it died while it created the run: remove {lock} and try again",
            )
        time.sleep(_LOOK_SECONDS)
