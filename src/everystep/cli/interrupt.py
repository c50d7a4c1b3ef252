"""Ctrl-C: what is half done is undone, and the command ends with one line and code 130.

An exception that a signal handler raises between any two operations may leave a lock locked, and a thread
that needs it waiting for ever. So threads that read are asked to stop first, and whoever waits for them hears
of it from them; where nobody reads, the exception comes a moment later. If even that gets stuck, a second
Ctrl-C ends the process as it is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from everystep.store.interrupt import ask_to_stop, somebody_stops

INTERRUPTED = 130
_MOMENT_SECONDS, _UNDOING_SECONDS = 0.1, 5.0
_AGAIN_SECONDS = 1.0  # before that it is the same Ctrl-C, pressed twice
_SHOW_CURSOR = "\x1b[?25h"


class _Handler:
    def __init__(self) -> None:
        self._first = 0.0

    def interrupt(self, *_: object) -> None:
        if not self._first:
            self._first = time.monotonic()
            ask_to_stop()
            signal.signal(signal.SIGALRM, self._raise)
            signal.setitimer(signal.ITIMER_REAL, _MOMENT_SECONDS)
        elif time.monotonic() - self._first > _AGAIN_SECONDS:
            _say_interrupted()
            os._exit(INTERRUPTED)

    def _raise(self, *_: object) -> None:
        if (
            somebody_stops()
        ):  # should nobody wait for that thread, the exception comes later all the same
            signal.signal(signal.SIGALRM, _raise_now)
            signal.setitimer(signal.ITIMER_REAL, _UNDOING_SECONDS)
        else:
            raise KeyboardInterrupt


def _raise_now(*_: object) -> None:
    raise KeyboardInterrupt


def _say_interrupted() -> None:
    on_terminal = sys.stderr.isatty()  # over the ^C that it shows
    sys.stderr.write(f"\r{_SHOW_CURSOR}interrupted\n" if on_terminal else "interrupted\n")
    sys.stderr.flush()


@contextmanager
def interruptible() -> Iterator[None]:
    """For the whole of a command; after a Ctrl-C the process is expected to end."""
    before = signal.signal(signal.SIGINT, _Handler().interrupt)
    try:
        yield
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say_interrupted()
        raise typer.Exit(INTERRUPTED) from None
    except BaseException:
        signal.signal(signal.SIGINT, before)
        raise
    signal.signal(signal.SIGINT, before)
