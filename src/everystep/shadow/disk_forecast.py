"""Looks at the disk and says how long it lasts: at attach, and after every base with what was measured."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import msgspec

from everystep.core.census import Census
from everystep.core.forecast import Forecast, base_bytes, forecast, record_bytes
from everystep.core.limits import limits_of
from everystep.core.retention import rules_of
from everystep.errors import StoreError
from everystep.format.base import BaseEntry
from everystep.lane.host import disk_free_bytes
from everystep.options import Options
from everystep.store.disk.meter import directory_bytes
from everystep.store.runs import read_lineage

log = logging.getLogger("everystep")


def forecast_disk(
    run: Path,
    census: Census,
    options: Options,
    *,
    base: int | None = None,
    seconds_per_step: float | None = None,
) -> Forecast:
    """What is known now; `base` is the size of the newest base, if one has been measured."""
    entries: list[BaseEntry] = []
    with contextlib.suppress(StoreError):  # no run yet, or one whose trouble shows elsewhere
        entries = [candidate.entry for candidate in read_lineage(run).candidates]
    free = disk_free_bytes(run)
    if quota := limits_of(options).store_quota:
        free = min(free, max(0, quota - directory_bytes(run)))
    expected = entries[0].new_bytes if entries else base_bytes(census)
    return forecast(
        options,
        rules_of(options),
        free_bytes=free,
        present_bytes=sum(entry.new_bytes for entry in entries),
        base_bytes=expected if base is None else base,
        record_bytes=record_bytes(census),
        seconds_per_step=seconds_per_step,
    )


class DiskForecast:
    """Used by the thread that writes bases."""

    def __init__(self, run: Path, census: Census, options: Options) -> None:
        self._run, self._census, self._options = run, census, options
        self._first: tuple[int, float] | None = None  # step and time of the first base
        self.latest: dict[str, Any] | None = None  # as status shows it

    def after(self, entry: BaseEntry) -> None:
        """A base is in the store: look again."""
        step, began = self._first = self._first or (entry.step, time.monotonic())
        steps = entry.step - step
        pace = (time.monotonic() - began) / steps if steps else None
        with contextlib.suppress(OSError, StoreError):
            found = forecast_disk(
                self._run, self._census, self._options, base=entry.new_bytes, seconds_per_step=pace
            )
            if found.warning and not (self.latest or {}).get("warning"):
                log.warning("disk_forecast run=%s %s", self._run, found.warning)
            self.latest = msgspec.to_builtins(found)
