"""Starts threads beside the main one, and is the boundary of each. `failed` hears of every error and can have
the work retried: an error that nobody hears of would end all work of its kind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Work = Callable[[], None]
Failed = Callable[[Exception], None]


def start_thread(name: str, work: Work, failed: Failed) -> threading.Thread | None:
    """Do the work in a thread. None: no thread could start; `failed` heard of that as of any other error."""
    thread = threading.Thread(
        target=guarded, args=(work, failed), name=f"everystep-{name}", daemon=True
    )
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        failed(error)
        return None
    return thread


def guarded(work: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    """What the work returns, or what `failed` returns if it raises."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 — boundary: a failure becomes a visible state
        return failed(error)
