"""The trainer's boundary: errors of ours end here, and training goes on."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from everystep.errors import CaptureError, CaptureTooLarge
from everystep.forks import ForkedRecorder
from everystep.health import Health

log = logging.getLogger("everystep")


class Guarded(Protocol):
    """Who stands behind it."""

    def outgrow(self, need_bytes: int) -> None:
        """A record does not fit into its slot and is not sent: a larger ring is needed."""

    def lose(self, reason: str) -> None:
        """Stop recording; a new shadow begins with a base."""


class Boundary:
    """Of one attach. Owned by the training thread."""

    def __init__(self, run: Path, guarded: Guarded, health: Health, *, raises: bool) -> None:
        self._run = run
        self._guarded = guarded
        self._health = health
        self._raises = raises
        self._forked: ForkedRecorder | None = None

    def guard(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """A failure of ours degrades recording loudly, unless the user wants it raised."""

        @functools.wraps(work)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self._forked is not None:
                return self._forked.tell()
            began = time.perf_counter()
            try:
                with self.or_replace():
                    return work(*args, **kwargs)
            except Exception as error:
                if self._raises:
                    raise
                self._lose(error)
            finally:
                self._health.spent(time.perf_counter() - began)
            return None

        return guarded

    @contextlib.contextmanager
    def or_replace(self) -> Iterator[None]:
        """What cannot be recorded costs the ring, or the shadow. All other errors go on."""
        try:
            yield
        except CaptureTooLarge as error:
            log.info("ring_outgrown run=%s %s", self._run, error)
            self._guarded.outgrow(error.need_bytes)
        except CaptureError as error:
            if self._raises:
                raise
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._guarded.lose(f"{type(error).__name__}: {error}")

    def disarm(self) -> str:
        """In a process that was forked from the trainer: nothing is done there. Returns why."""
        self._forked = ForkedRecorder(self._run)
        return self._forked.problem
