"""Find a point and load it; a second time if what was found turns out to be damaged on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from everystep.errors import CorruptData
from everystep.lane.runtime import ShadowCard
from everystep.recover.find import find_newest
from everystep.recover.point import RestorePoint

log = logging.getLogger(__name__)


def attempts(*, lazily: bool = True) -> Iterator[Attempt]:
    """`for attempt in attempts(): with attempt: …`, which finds and loads.

    A log is read while it is replayed. If a record turns out to be damaged then, begin again and check all of
    them before anything is loaded: so it is known where they end. `lazily`: whether loading replays them."""
    first = Attempt(verify_lazily=lazily, may_fail=True)
    yield first
    if first.failed:
        yield Attempt(verify_lazily=False, may_fail=False)


class Attempt:
    """The body of its `with` finds a point and loads it. If that raises, the point is closed."""

    def __init__(self, *, verify_lazily: bool, may_fail: bool) -> None:
        self._verify_lazily, self._may_fail = verify_lazily, may_fail
        self.failed = False  # and there is another one
        self.found: RestorePoint | None = None
        self.card: ShadowCard | None = None  # of the shadow that lives

    def find(
        self, run: Path, folder: Path | None, step: int | None = None, *, exact: bool = False
    ) -> None:
        self.found, self.card = find_newest(
            run, folder, step, exact=exact, verify_lazily=self._verify_lazily
        )

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            return False
        if self.found is not None:
            self.found.close()
            self.found = None  # nor is what was read of it needed while it is found again
        self.failed = self._may_fail and isinstance(error, CorruptData)
        if self.failed:
            log.warning("damage_met_on_the_way error=%s", error)
        return self.failed
