"""Limits of this process that look like a lack of memory when they are met."""

from __future__ import annotations

import errno
import resource
from typing import NamedTuple


class Limit(NamedTuple):
    which: int
    name: str
    ulimit: str  # how a shell shows and raises it


FILE_SIZE = Limit(resource.RLIMIT_FSIZE, "RLIMIT_FSIZE", "ulimit -f")
ADDRESS_SPACE = Limit(resource.RLIMIT_AS, "RLIMIT_AS", "ulimit -v")
LOCKED = Limit(resource.RLIMIT_MEMLOCK, "RLIMIT_MEMLOCK", "ulimit -l")

_BEHIND = {errno.EFBIG: FILE_SIZE, errno.ENOMEM: ADDRESS_SPACE, errno.EAGAIN: LOCKED}


def limit_bytes(limit: Limit) -> int:
    """-1: unlimited."""
    soft = resource.getrlimit(limit.which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def limit_behind(number: int) -> Limit | None:
    """The limit that makes a call for memory fail with this errno, if this process has it at all."""
    limit = _BEHIND.get(number)
    return limit if limit is not None and limit_bytes(limit) >= 0 else None
