"""A base that is written while the replica changes needs a copy of it. The next pass over the state makes
that copy as it goes. If no pass comes, the copy is made without one, while the replica does not change."""

from __future__ import annotations

import contextlib
import threading
import time

from everystep.lane.memory import address_of, copy, fresh, populate, room_for
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.replica import Key
from everystep.store.snapshot import Snapshot

_PATIENCE_SECONDS = 1.0
_SMALL_BYTES = 64 << 20  # is cleared in a moment


class Room:
    """Memory for a copy, made real beside the main thread: a pass that has to clear gigabytes on its way
    takes so long that the ring runs full meanwhile, and training waits."""

    def __init__(self, size: int) -> None:
        self.memory = fresh(size)
        self._filler: threading.Thread | None = None
        if size >= _SMALL_BYTES:
            filler = threading.Thread(target=self._populate, name="everystep-room", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread to be had: a pass makes it real
                filler.start()
                self._filler = filler

    def _populate(self) -> None:
        """What is refused now is made real later."""
        with contextlib.suppress(RuntimeError):  # no threads to be had, or the process is ending
            populate(address_of(self.memory), len(self.memory))

    @property
    def ready(self) -> bool:
        return self._filler is None or not self._filler.is_alive()


class BaseCopy:
    """Owned by the main thread, except while `aside` runs in the writer's."""

    def __init__(
        self, snapshot: Snapshot, base_writer: BaseWriter, room: Room | None = None
    ) -> None:
        changed = [t for t in snapshot.tensors if base_writer.is_new(t, snapshot.census)]
        rooms = room_for([t.data for t in changed], room.memory if room else None)
        targets = {t.key: room for t, room in zip(changed, rooms, strict=True)}
        self.sources: dict[Key, memoryview] = {t.key: t.data for t in changed}
        self.targets: dict[Key, memoryview] = targets
        self.snapshot = snapshot._replace(
            tensors=[t.at(targets.get(t.key, t.data)) for t in snapshot.tensors]
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
