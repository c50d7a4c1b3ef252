"""What only the user's own optimizer can replay: the shadow keeps it behind the base of its atoms."""

from __future__ import annotations

from collections import deque
from itertools import count

from everystep.core.census import Census, Mode
from everystep.core.events import GRADIENT, Call, Edit, Event, Rebase, SlotValues
from everystep.format.entry import frame_entry
from everystep.format.slot import pack_events
from everystep.replay.engine import Entry, Record

Entries = list[Entry[memoryview]]


class Tail:
    """Owned by the shadow's main thread."""

    def __init__(self, census: Census) -> None:
        self._modes = [spec.mode for spec in census.optimizers]
        self.atoms = {a for s in census.optimizers if s.mode is Mode.LOG for a in s.atoms}
        self._frames: deque[tuple[int, bytes]] = deque()  # each of so many steps

    def split(self, record: Record[memoryview]) -> tuple[Record[memoryview], Entries]:
        """A record without what belongs to the tail, and what it adds to the tail."""
        if not self.atoms:
            return record, []
        based_at = _based_at(record)
        begins = max((based_at.get(atom, -1) for atom in self.atoms), default=-1)
        own: Entries = []
        logged: Entries = []
        positions = count()
        for events, payload in record:
            mine: list[Event] = []
            theirs: list[Event] = []
            for event, position in zip(events, positions, strict=False):
                if not self._logs(event) or position < based_at.get(_atom(event), -1):
                    mine.append(event)
                elif position > begins:
                    theirs.append(event)
            own.append((mine, payload))
            logged += [(theirs, payload)] if theirs else []
        return own, logged

    def add(self, entries: Entries) -> None:
        """What a record adds."""
        if entries:
            frames = (frame_entry(*pack_events(list(e)), payload) for e, payload in entries)
            self._frames.append((1, b"".join(frames)))

    def adopt(self, steps: int, data: bytes) -> None:
        """Take over that of the shadow before."""
        self._frames.append((steps, data))

    def clear(self) -> None:
        self._frames.clear()

    @property
    def data(self) -> bytes:
        return b"".join(data for _, data in self._frames)

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in self._frames)

    @property
    def steps(self) -> int:
        return sum(steps for steps, _ in self._frames)

    def _logs(self, event: Event) -> bool:
        """Whether an event has its place among calls that only the user's optimizer can replay. A gradient
        that waits for a later call is always the newest."""
        if isinstance(event, Call):
            return self._modes[event.optimizer] is Mode.LOG
        waits = isinstance(event, Edit) and event.slot == GRADIENT
        return not waits and _atom(event) in self.atoms


def _based_at(record: Record[memoryview]) -> dict[int, int]:
    """Where in the record an atom's base is complete."""
    events = (event for events, _ in record for event in events)
    return {
        atom: position
        for position, event in enumerate(events)
        if isinstance(event, Rebase)
        for atom in event.atoms
    }


def _atom(event: Event) -> int:
    return event.atom if isinstance(event, Edit | SlotValues) else -1
