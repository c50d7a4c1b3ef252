"""A disk that refuses: full, broken, slow, or taking less than it is given, at the n-th call of any kind,
once, for a while, or until somebody makes room. Drawn from a seed."""

from __future__ import annotations

import errno
import random
import time
from typing import Any

_ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOMEM)
_CALLS = (
    "open",
    "write",
    "ftruncate",
    "fsync",
    "fdatasync",
    "mkdir",
    "replace",
    "link",
    "unlink",
    "rmdir",
)
READS = ("open to read", "preadv", "listdir", "stat")
_READ_ERRORS = (errno.EIO, errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM)
_READS_AT_MOST = 1000  # in one operation, about
_SLOW_SECONDS = 0.005


class Faults:
    """Given to a Disk as what happens before each of its calls. None happens until it is `armed`."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._left = 0  # calls until it strikes
        self._lasts = 0
        self._calls: tuple[str, ...] = ()
        self._error: int = 0
        self.struck: list[str] = []

    def arm(self) -> None:
        chance = self._chance
        if chance.random() < 0.3:
            self._left = int(_READS_AT_MOST ** chance.random())
            self._lasts = chance.choice([1, 1, 3, 10**6])
            self._calls = READS if chance.random() < 0.5 else (chance.choice(READS),)
            self._error = chance.choice(_READ_ERRORS)
            return
        self._left = chance.randrange(60)
        self._lasts = chance.choice([1, 1, 1, 3, 10, 10**6])
        self._calls = _CALLS if chance.random() < 0.5 else (chance.choice(_CALLS),)
        self._error = chance.choice([*_ERRORS, errno.EIO, 0, -1])  # 0: slow; -1: short writes

    def rest(self) -> None:
        """The disk is well."""
        self._calls = ()

    @property
    def reads_failed(self) -> bool:
        return any(told.endswith(READS) for told in self.struck)

    def __call__(self, name: str, what: Any) -> int | None:
        if name not in self._calls:
            return None
        self._left -= 1
        if self._left >= 0 or self._lasts <= 0:
            return None
        self._lasts -= 1
        if self._error == 0:
            time.sleep(_SLOW_SECONDS)
        elif self._error == -1:
            size = memoryview(what).nbytes if name == "write" else 0
            return self._chance.randrange(1, size + 1) if size else None
        else:
            self.struck.append(f"{errno.errorcode[self._error]} in {name}")
            path = what if isinstance(what, str) else None
            raise OSError(self._error, "planted", path)
        return None
