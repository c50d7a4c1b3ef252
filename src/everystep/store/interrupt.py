"""Ctrl-C for threads: a signal reaches the main thread alone, which then waits for those that read for it.

Whatever reads much asks here, piece by piece, and whoever waits for it hears of it in turn. Only commands
ever ask a process to stop.
"""

from __future__ import annotations

_asked = False
_noticed = False


def ask_to_stop() -> None:
    """Called by a signal handler."""
    global _asked
    _asked = True


def stop_if_asked() -> None:
    global _noticed
    if _asked:
        _noticed = True
        raise KeyboardInterrupt


def somebody_stops() -> bool:
    """Whether a KeyboardInterrupt is on its way."""
    return _noticed
