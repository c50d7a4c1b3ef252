"""What became of the epochs of a run: how long each lived, and whether it ended well."""

from __future__ import annotations

import contextlib
from pathlib import Path

from everystep.core.failures import Life
from everystep.errors import StoreError
from everystep.format.base import Manifest
from everystep.store import layout
from everystep.store.runs import read_manifest


def lives_of(run: Path, *, newest_lives: bool) -> list[Life]:
    """Oldest first. Epochs that cannot be read, or from before their times were written down, say nothing."""
    found: list[Life] = []
    for place, number in enumerate(layout.epoch_numbers(run)):
        try:
            manifest = read_manifest(run, number)
        except StoreError:
            continue
        if manifest is not None and manifest.opened:
            seconds = max(0.0, _last_seen(run, manifest) - manifest.opened)
            lives = newest_lives and place == 0
            found.append(Life(seconds, failed=not manifest.closed and not lives))
    return found[::-1]


def _last_seen(run: Path, manifest: Manifest) -> float:
    times = [manifest.opened, manifest.closed, *(entry.time for entry in manifest.bases)]
    for segment in layout.segments(run, manifest.epoch)[-1:]:
        with contextlib.suppress(FileNotFoundError):
            times.append(segment.stat().st_mtime)
    return max(times)
