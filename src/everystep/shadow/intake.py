"""From entries in the ring to whole records, which the replica replays. Main thread only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from everystep.core.census import Census, Mode
from everystep.core.events import Edit, Event, Rebase, Seal
from everystep.format.base import SessionValues
from everystep.format.slot import FLAG_GAP
from everystep.lane.ring import Entry, RingReader
from everystep.replay.engine import plain_run, seal_of
from everystep.shadow.copies import BaseCopy
from everystep.shadow.replica import Replica
from everystep.shadow.replica_state import ReplicaState

_RUN_MAX = 8  # records that one pass replays; more save little
_PATIENCE_SECONDS = 0.5
Entries = list[tuple[list[Event], memoryview]]


class _Held(NamedTuple):
    entry: Entry
    in_ring: bool


class _Record(NamedTuple):
    entries: Entries
    step: int
    ticket: int  # of the last entry


class Intake:
    """Reads the ring. An unfinished record waits in the ring, or in memory where the ring is short."""

    def __init__(
        self, census: Census, ring: RingReader, replica: Replica, session: SessionValues
    ) -> None:
        self.census = census
        self.ring = ring
        self.replica = replica
        self.state = ReplicaState(replica, session, ring.request_atoms)
        # told of every record that can be replayed, in its order
        self.on_record: Callable[[Seal, Entries], None] | None = None
        self.gap = False  # records were dropped: everything must be re-based
        self.in_doubt = False  # half a record may have been replayed
        # a new base is asked for, and until it comes the replica is what there is
        self._kept = False
        self.records = 0
        self.passes = 0  # over the state; one may replay several records
        self.replay_seconds = 0.0
        self._held: list[_Held] = []  # the record still arriving
        self._records: deque[_Record] = deque()  # whole records, not yet replayed
        self._moved = {atom for spec in census.optimizers for atom in spec.atoms}
        self._arriving: set[int] = set()  # atoms whose base was read
        self._skipping = False
        self._waiting_since = 0.0  # when the oldest record that is not yet replayed came

    @property
    def step(self) -> int:
        return self.state.step

    @property
    def whole(self) -> bool:
        return self.state.whole

    @property
    def drifted(self) -> set[int]:
        return self.state.drifted

    @property
    def sealed_step(self) -> int:
        """The newest step whose record is whole: it survives the trainer, replayed or not."""
        return self._records[-1].step if self._records else self.step

    @property
    def record_waits(self) -> bool:
        return bool(self._records)

    @property
    def waits_for_base(self) -> bool:
        """What comes next, if it comes, has nothing to do with the state that is here."""
        return self._kept or (self.gap and not self._records)

    @property
    def one_pass_replays_many(self) -> bool:
        """Whether twins move everything: several records in a pass, which may copy the state on its way."""
        advance = self.state.advances.get(0)
        return advance is not None and advance.copies and len(self.census.optimizers) == 1

    # ------------------------------------------------------------------ records

    def take(self, *, may_apply: bool, patient: bool = False, base: BaseCopy | None = None) -> bool:
        """Read what there is, then replay a record, or as many as one pass takes; False if there is nothing
        to do now. A record in the ring is safe: who is `patient` lets a pass's worth of them come together.
        `base` is filled by the pass, with the state before it; a record that no pass can replay waits until
        somebody else has filled it."""
        moved = self._read(may_apply or not self._kept)  # what comes next overwrites the replica
        if not (self._records and may_apply and self.state.can_replay(self._records[0].entries)):
            return moved
        run = self._plain_run()
        if base is not None and not run:
            base.wanted_since = 0.0
            return moved
        if patient and self._more_will_come(run):
            return moved
        began = time.monotonic()
        self._replay(run, base)
        self.replay_seconds += time.monotonic() - began
        self.passes += 1
        return True

    def _read(self, may_read: bool) -> bool:
        moved = False
        while may_read and not self.gap and (entry := self.ring.read()) is not None:
            moved = True
            self._hold(entry)
        self._spill_if_crowded()
        return moved

    def _replay(self, run: int, base: BaseCopy | None) -> None:
        """A plain run in one pass, or one record."""
        self.in_doubt = True
        records = [self._records.popleft() for _ in range(run or 1)]
        if run:
            self.state.replay_together([record.entries for record in records], base)
            self._waiting_since = time.monotonic()
        else:
            self.state.replay(records[0].entries)
        self.ring.release(records[-1].ticket)
        self.records += len(records)
        self.in_doubt = False

    def _plain_run(self) -> int:
        """How many of the waiting records one pass can replay."""
        modes = [spec.mode for spec in self.census.optimizers]
        if modes != [Mode.REPLAY] or not self.replica.complete:
            return 0
        return plain_run((record.entries for record in self._records), self._moved, _RUN_MAX)

    def _more_will_come(self, run: int) -> bool:
        """Whether a pass should wait: half the ring stays free for what arrives meanwhile. torch takes
        records one by one, so nothing is won by waiting for it."""
        if not self.one_pass_replays_many:
            return False
        wanted = min(_RUN_MAX, self.ring.geometry.slots // 2)
        waited = time.monotonic() - self._waiting_since
        return 0 < run == len(self._records) < wanted and waited < _PATIENCE_SECONDS

    # ------------------------------------------------------------------ what arrives

    def _hold(self, entry: Entry) -> None:
        if entry.flags & FLAG_GAP:
            self._held.clear()
            self.gap = True
            return
        if self._kept:
            self._give_up_state()
        if self._skipping:  # the rest of a record whose beginning was given up
            self._skipping = not entry.sealed
            return
        fresh = []  # nothing consistent to disturb: these bytes are taken at once
        for event in entry.events:
            if isinstance(event, Rebase):
                self._arriving.update(event.atoms)
            elif isinstance(event, Edit) and not self._has_base(event.atom):
                fresh.append((event, entry.payload))
        self.replica.write(fresh)
        self._held.append(_Held(entry, True))
        if entry.sealed:
            self._record_arrived(entry)

    def _record_arrived(self, last: Entry) -> None:
        if not self._records:
            self._waiting_since = time.monotonic()
        held, self._held = self._held, []  # whole, whatever becomes of it
        entries = [(h.entry.events, h.entry.payload) for h in held]
        self._records.append(_Record(entries, last.step, last.ticket))
        # where an atom has no base yet, its gradients did not travel: nobody could replay the record
        whole = all(map(self._has_base, range(len(self.census.atoms))))
        if self.on_record is not None and whole:
            self.on_record(seal_of(entries), entries)

    def _has_base(self, atom: int) -> bool:
        """Whether an atom is based, or will be by a record that is here but not yet replayed."""
        return self.replica.based[atom] or atom in self._arriving

    def _spill_if_crowded(self) -> None:
        """A step larger than half the ring moves into memory, so that it can go on arriving."""
        in_ring = sum(held.in_ring for held in self._held)
        if self._records or not in_ring or 2 * in_ring < self.ring.geometry.slots:
            return
        self._held = [
            _Held(held.entry._replace(payload=memoryview(bytearray(held.entry.payload))), False)
            if held.in_ring
            else held
            for held in self._held
        ]
        self.ring.release(self._held[-1].entry.ticket)

    # ------------------------------------------------------------------ what is given up

    def forget(self, *, keep: bool = False) -> None:
        """Start over: the trainer will send everything again. `keep` the state until it begins to: nothing
        newer may ever come, and the store may not have it."""
        self._skipping = bool(self._held) and not self.gap
        self.gap = self.in_doubt = False
        self.ring.release_read()
        self._arriving.clear()
        self._held.clear()
        self._records.clear()
        self._kept = keep
        if not keep:
            self._give_up_state()
        self.state.forget_requests()

    def _give_up_state(self) -> None:
        self._kept = False
        self.state.give_up()

    def stay(self) -> None:
        """The trainer is gone and will send nothing again: the state that is here is the newest."""
        self.gap = self._kept = False
        self._held.clear()
        self.ring.skip()

    def drop_unsealed(self) -> None:
        """The trainer is gone: what it had not sealed never happened."""
        self._held.clear()
        if self.ring.taken > self.ring.released:
            self.ring.release(self.ring.taken - 1)
