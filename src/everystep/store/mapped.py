"""Stored files, mapped: nothing is read before somebody looks at it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from everystep.errors import CorruptData


def map_file(path: Path) -> memoryview:
    """The bytes of a file; writing to them changes nothing but this copy."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptData(f"read {path}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY)) if size else memoryview(b"")
    finally:
        os.close(fd)
