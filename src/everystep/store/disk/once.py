"""A small file that of several racing writers exactly one puts there, whole; the others find it."""

from __future__ import annotations

import contextlib
import logging
import os
import time

from everystep.errors import StoreError
from everystep.store.disk.commit import write_temporary
from everystep.store.disk.files import (
    TEMPORARY_PREFIX,
    RunPath,
    create_file,
    link_file,
    look_at,
    remove_file,
    replace_file,
    sync_folder,
)

log = logging.getLogger("everystep")

_LOCKED_SECONDS_MAX = 10.0
_LOOK_SECONDS = 0.02


def put_once(path: RunPath, data: bytes) -> None:
    """It is there when this returns, ours or that of another. A hard link cannot replace a file; where links
    are refused (some network file systems, SELinux), a lock file lets one writer in at a time."""
    temporary = write_temporary(path, data)
    try:
        link_file(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        log.warning("hard_link_refused path=%s error=%s: a lock file is used", path, error)
        _put_locked(temporary, path)
    finally:
        remove_file(temporary)
    sync_folder(path.parent)


def _put_locked(temporary: RunPath, path: RunPath) -> None:
    lock = path.beside(f"{TEMPORARY_PREFIX}{path.name}-lock")
    deadline = time.monotonic() + _LOCKED_SECONDS_MAX
    while look_at(path) is None:
        with contextlib.suppress(FileExistsError):
            os.close(create_file(lock))
            try:
                if look_at(path) is None:  # else somebody was let in before us
                    replace_file(temporary, path)
            finally:
                remove_file(lock)
            return
        if time.monotonic() > deadline:
            raise StoreError(
                f"create {path}: {lock.name} is there for more than {_LOCKED_SECONDS_MAX:.0f} s",
                hint=f"whoever made it died while it created the run: remove {lock} and try again",
            )
        time.sleep(_LOOK_SECONDS)
