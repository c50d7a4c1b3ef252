"""A base that is written while the replica moves on needs a copy of it. The next pass over the state makes it
on its way; where no pass comes, it is made aside while the replica holds still."""

from __future__ import annotations

import time

from everystep.lane.memory import copy, room_for
from everystep.shadow.persist import Persister
from everystep.shadow.replica import Key
from everystep.store.bases import Snapshot

_PATIENCE_SECONDS = 1.0


class BaseCopy:
    """Owned by the main thread, except while `aside` runs in the writer's."""

    def __init__(self, snapshot: Snapshot, persister: Persister) -> None:
        changed = [t for t in snapshot.tensors if persister.is_new(t, snapshot.census)]
        rooms = room_for([t.data for t in changed])
        targets = {(t.atom, t.slot): room for t, room in zip(changed, rooms, strict=True)}
        self.sources: dict[Key, memoryview] = {(t.atom, t.slot): t.data for t in changed}
        self.targets: dict[Key, memoryview] = targets
        self.snapshot = snapshot._replace(
            tensors=[
                t._replace(data=targets.get((t.atom, t.slot), t.data)) for t in snapshot.tensors
            ]
        )
        self.filled = False
        self.wanted_since = time.monotonic()

    @property
    def overdue(self) -> bool:
        """No pass came by."""
        return time.monotonic() - self.wanted_since > _PATIENCE_SECONDS

    def aside(self) -> None:
        copy(list(self.targets.values()), list(self.sources.values()))
        self.filled = True
