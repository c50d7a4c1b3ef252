"""Work in threads beside the main one, and the boundary of each: whatever ends it is told, for it is tried
again by whoever is told, and an error in a thread that nobody hears of ends all work of its kind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Work = Callable[[], None]
Failed = Callable[[Exception], None]


def start_thread(name: str, work: Work, failed: Failed) -> threading.Thread | None:
    """Have it done in a thread. None: there is none to be had, which was told like any other failure."""
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
    """What the work returns, or, where it fails, who is told."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 — boundary: a failure becomes a visible state
        return failed(error)
