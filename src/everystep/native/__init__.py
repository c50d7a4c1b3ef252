"""The compiled twins: a C library without Python in it, loaded through ctypes by every Python 3 alike."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

TARGET = np.dtype(
    [
        ("value", np.uint64),
        ("slots", np.uint64, 3),
        ("copies", np.uint64, 4),
        ("count", np.int64),
    ],
    align=True,
)
STEP = np.dtype(
    [("gradient", np.uint64), ("number", np.float64, 10), ("flags", np.uint32)], align=True
)


_LIBRARY = Path(__file__).with_name("_replay.so")


class Missing(NamedTuple):
    """Why there is no library, and what helps."""

    why: str
    remedy: str
    asked: bool = False  # somebody wants torch in its place


@functools.cache
def library() -> ctypes.CDLL | None:
    """None where `missing` says why. EVERYSTEP_NATIVE may name another library."""
    asked = os.environ.get("EVERYSTEP_NATIVE", "")
    if asked:
        return None if asked == "0" else _declared(ctypes.CDLL(asked))
    opened = _opened() if _LIBRARY.exists() else None
    return _declared(opened) if isinstance(opened, ctypes.CDLL) else None


def missing() -> Missing | None:
    """What to tell a person where torch has to do what the library would do."""
    if library() is not None:
        return None
    if os.environ.get("EVERYSTEP_NATIVE") == "0":
        return Missing("EVERYSTEP_NATIVE=0 leaves the twins out", "unset it", asked=True)
    if not _LIBRARY.exists():
        return Missing(
            "the twins were not compiled",
            "install gcc or clang, then: python -m everystep.native.build",
        )
    return Missing(
        f"the compiled twins cannot be loaded ({_opened()})",
        "install libgomp.so.1 (Debian and Ubuntu: libgomp1), or torch from PyPI, which brings it along",
    )


def _opened() -> ctypes.CDLL | OSError:
    """OpenMP's runtime comes with gcc. A machine without it has the one in torch's wheel: once that is in
    memory, the loader takes it by its name. torch itself need not be imported."""
    try:
        return ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        torch = importlib.util.find_spec("torch")
        for folder in torch.submodule_search_locations or () if torch else ():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(Path(folder) / "lib" / "libgomp.so.1"))
                return ctypes.CDLL(str(_LIBRARY))
        return error


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.everystep_replay.argtypes = [ctypes.c_char_p, address, count, address, count, number]
    loaded.everystep_mkl_roots.argtypes = [address, count]
    loaded.everystep_copy.argtypes = [address, count, number]
    loaded.everystep_digests.argtypes = [address, count, count, address, number]
    loaded.everystep_find.argtypes = [address, *[count] * 3, *[address] * 2, number]
    loaded.everystep_gather.argtypes = [address, *[count] * 2, *[address] * 4, number]
    return loaded


def replay(twin: str, targets: np.ndarray, steps: np.ndarray, threads: int) -> None:
    """Steps (one row of k for every target) over the targets; both hold addresses."""
    loaded = library()
    assert loaded is not None
    count, k = steps.shape
    code = loaded.everystep_replay(
        twin.encode(), targets.ctypes.data, count, steps.ctypes.data, k, threads
    )
    if code:
        raise ValueError(f"replay: there is no twin {twin}")


def mkl_roots(numbers: np.ndarray) -> np.ndarray:
    """Square roots of float32 as a twin takes them where torch has them from MKL."""
    loaded = library()
    assert loaded is not None
    found = np.array(numbers, np.float32)
    loaded.everystep_mkl_roots(found.ctypes.data, found.size)
    return found


def copy(rows: list[tuple[int, int, int]], threads: int) -> bool:
    """Bytes (to, from, how many); False where nothing was compiled, and nothing was copied."""
    loaded = library()
    if loaded is None:
        return False
    table = np.array(rows, np.uint64).reshape(-1, 3)
    loaded.everystep_copy(table.ctypes.data, len(table), threads)
    return True


def find_words(
    ranges: np.ndarray, counts: np.ndarray, masks: np.ndarray, stride: int, threads: int
) -> None:
    """Which words in every `stride`-th block of the ranges (address, bytes, blocks before) are not zero: how
    many into `counts`, a bit for each into `masks`."""
    loaded = library()
    assert loaded is not None
    loaded.everystep_find(
        ranges.ctypes.data,
        len(ranges),
        stride,
        len(counts),
        counts.ctypes.data,
        masks.ctypes.data,
        threads,
    )


def gather_words(
    ranges: np.ndarray,
    masks: np.ndarray,
    starts: np.ndarray,
    places: np.ndarray,
    values: np.ndarray,
    threads: int,
) -> None:
    """The words that were found, block by block from `starts` on: places in the block, and values."""
    loaded = library()
    assert loaded is not None
    loaded.everystep_gather(
        ranges.ctypes.data,
        len(ranges),
        len(starts),
        masks.ctypes.data,
        starts.ctypes.data,
        places.ctypes.data,
        values.ctypes.data,
        threads,
    )
