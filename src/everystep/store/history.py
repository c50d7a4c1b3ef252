"""What became of the terms of a run: how long each lived, and whether it ended well."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from everystep.core.cadence import age_seconds
from everystep.core.failures import Life
from everystep.core.limits import Written, written_last_day
from everystep.errors import StoreError
from everystep.format.base import Manifest
from everystep.store import layout
from everystep.store.disk.files import modified_at
from everystep.store.runs import read_manifest

_LOGGED_SECONDS_MAX = 86400.0  # behind a base; more than that tells of a clock that was set


def lives_of(run: Path, *, newest_lives: bool) -> list[Life]:
    """Oldest first. Terms that cannot be read, or from before their times were written down, say nothing."""
    found: list[Life] = []
    for place, number in enumerate(layout.term_numbers(run)):
        try:
            manifest = read_manifest(run, number)
        except StoreError:
            continue
        if manifest is not None and manifest.opened:
            lives = newest_lives and place == 0
            found.append(Life(_seconds(run, manifest), failed=not manifest.closed and not lives))
    return found[::-1]


def written_lately(run: Path, but: int) -> int:
    """Bytes that the writers of all terms but one wrote within the last day, as far as manifests tell."""
    found = []
    for number in layout.term_numbers(run):
        with contextlib.suppress(StoreError):
            manifest = read_manifest(run, number)
            if manifest is not None and number != but:
                opened_ago = age_seconds(manifest.opened, time.time())
                ended_ago = None if opened_ago is None else max(0.0, opened_ago - manifest.lived)
                found.append(Written(ended_ago, manifest.lived, manifest.written))
    return written_last_day(found)


def _seconds(run: Path, manifest: Manifest) -> float:
    """What its writer measured by a clock that never jumps, and how much longer it went on logging."""
    lived = manifest.lived
    if not lived and manifest.bases:  # from before that was measured
        lived = max(0.0, manifest.bases[-1].time - manifest.opened)
    written = modified_at(layout.manifest_path(run, manifest.term))
    logged = max(map(modified_at, layout.segments(run, manifest.term)), default=0.0)
    return lived + min(max(0.0, logged - written), _LOGGED_SECONDS_MAX)
