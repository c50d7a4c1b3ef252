"""From entries in the ring to records, and from records to the replica. Main thread only."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from everystep.core.census import Census, Mode
from everystep.core.events import (
    GRADIENT,
    Call,
    Edit,
    Event,
    Fingerprints,
    Rebase,
    Seal,
    SlotValues,
)
from everystep.errors import CorruptData
from everystep.format.base import SessionValues, after_seal
from everystep.format.entry import frame_entry
from everystep.format.slot import FLAG_GAP, pack_events
from everystep.lane.ring import Entry, RingReader
from everystep.shadow.copies import BaseCopy
from everystep.shadow.replica import Replica

log = logging.getLogger(__name__)

_TAIL_BYTES_MIN = 64 << 20
_REPAIRED_NAMED = 10
_RUN_MAX = 8  # records that one pass redoes; more save little
_PATIENCE_SECONDS = 0.5


class Advance(Protocol):
    """Moves the atoms of one optimizer."""

    copies: bool  # whether a pass can fill a base on its way

    def calls(
        self, calls: Sequence[tuple[Call, memoryview]], base: BaseCopy | None = None
    ) -> list[list[int]]:
        """Apply calls in their order; returns the atoms that each of them moved."""

    def slots_changed(self, atom: int) -> None:
        """The atom's slots were written or replaced from outside."""


class _Held(NamedTuple):
    entry: Entry
    in_ring: bool


class Intake:
    """Reads the ring. An unfinished record waits in the ring, or in memory where the ring is short."""

    def __init__(
        self, census: Census, ring: RingReader, replica: Replica, session: SessionValues
    ) -> None:
        self.census = census
        self.ring = ring
        self.replica = replica
        self.session = session
        self.advances: dict[int, Advance] = {}  # by optimizer; torch's come once it is loaded
        self.tail: deque[tuple[int, bytes]] = deque()  # steps and frames: calls nobody here redoes
        # told of every record that can be redone, in its order
        self.on_record: Callable[[Seal, list[tuple[list[Event], memoryview]]], None] | None = None
        self.gap = False  # records were let go: everything must be based anew
        self.in_doubt = False  # half a record may have been redone
        self._kept = (
            False  # a new base is asked for, and until it comes the replica is what there is
        )
        self.records = 0
        self.passes = 0  # over the state; one may redo several records
        self.calls = 0  # of optimizers that were redone here: the first ones make slots
        self.replay_seconds = 0.0
        self.repairs = 0
        self.repaired: list[str] = []  # atoms of the newest repair
        self.prints_checked = 0
        self.drifted: set[int] = set()
        self._held: list[_Held] = []  # the record still arriving
        self._records: deque[list[_Held]] = deque()  # whole records, not yet redone
        self._log_atoms = {a for s in census.optimizers if s.mode is Mode.LOG for a in s.atoms}
        self._moved = {atom for spec in census.optimizers for atom in spec.atoms}
        self._fold_asked = False
        self._edits: list[tuple[Edit, memoryview]] = []  # of the record being redone
        self._arriving: set[int] = set()  # atoms whose base was read but not yet applied
        self._skipping = False
        self._waiting_since = 0.0  # when the oldest record that is not yet redone came

    @property
    def step(self) -> int:
        return self.session.step

    @property
    def whole(self) -> bool:
        """Every atom has a base and a seal has closed it: a state to resume from."""
        return self.replica.complete and bool(self.session.rng)

    @property
    def sealed_step(self) -> int:
        """The newest step whose record is whole: it survives the trainer, redone or not."""
        return self._records[-1][-1].entry.step if self._records else self.step

    @property
    def record_waits(self) -> bool:
        return bool(self._records)

    @property
    def one_pass_redoes_many(self) -> bool:
        """Whether twins move everything: several records in a pass, which may copy the state on its way."""
        advance = self.advances.get(0)
        return advance is not None and advance.copies and len(self.census.optimizers) == 1

    def take(self, *, may_apply: bool, patient: bool = False, base: BaseCopy | None = None) -> bool:
        """Read what there is, then redo a record, or as many as one pass takes; False if there is nothing
        to do now. A record in the ring is safe: who is `patient` lets a pass's worth of them come together.
        `base` is filled by the pass, with the state before it; a record that no pass can redo waits until
        somebody else has filled it."""
        moved = False
        may_read = may_apply or not self._kept  # what comes next overwrites the replica
        while may_read and not self.gap and (entry := self.ring.read()) is not None:
            moved = True
            self._hold(entry)
        self._spill_if_crowded()
        if self._records and may_apply and self._can_redo(self._records[0]):
            run = self._plain_run()
            if base is not None and not run:
                base.wanted_since = 0.0
                return moved
            if not (patient and self._more_will_come(run)):
                began = time.monotonic()
                self.in_doubt = True
                self._apply_run(run, base) if run else self._apply(self._records.popleft())
                self.in_doubt = False
                self.replay_seconds += time.monotonic() - began
                self.passes += 1
                return True
        return moved

    def _plain_run(self) -> int:
        """How many of the waiting records one pass can replay: a call each, and what it does not touch."""
        run = 0
        if len(self.census.optimizers) > 1 or not self.replica.complete:
            return run
        for record in self._records:
            call = self._only_call(record)
            if run == _RUN_MAX or call is None or not self._replays(call):
                break
            run += 1
            if _prints(record):
                break  # compared before anything moves on
        return run

    def _more_will_come(self, run: int) -> bool:
        """Whether a pass should wait: half the ring stays free for what arrives meanwhile. torch takes
        records one by one, so nothing is won by waiting for it."""
        if not self.one_pass_redoes_many:
            return False
        wanted = min(_RUN_MAX, self.ring.geometry.slots // 2)
        waited = time.monotonic() - self._waiting_since
        return 0 < run == len(self._records) < wanted and waited < _PATIENCE_SECONDS

    def _apply_run(self, run: int, base: BaseCopy | None) -> None:
        """Redo several plain records in one pass over the state."""
        records = [self._records.popleft() for _ in range(run)]
        calls = [
            (self._only_call(r), held.entry.payload) for r in records for held in r if _calls(held)
        ]
        moved = self.advances[0].calls([(c, payload) for c, payload in calls if c], base)
        self.calls += len(moved)
        for record, atoms in zip(records, moved, strict=True):
            seal = _seal(record)
            self._check_order(seal)
            edits = _edits(record)
            self.replica.write(edits)  # of atoms that the calls do not move
            for atom in (*atoms, *(edit.atom for edit, _ in edits)):
                self.replica.versions[atom] = seal.step
            self.session = after_seal(self.session, seal)
        for prints, payload in _prints(records[-1]):
            self._compare(prints, payload, self.step)
        self.ring.release(records[-1][-1].entry.ticket)
        self.records += run
        self._waiting_since = time.monotonic()

    def _only_call(self, record: list[_Held]) -> Call | None:
        """The call of a record that holds nothing else but fingerprints, its seal, and values of buffers and
        frozen parameters: those may be written before or after it."""
        events = [event for held in record for event in held.entry.events]
        first, *others = (event for event in events if not self._is_beside(event))
        return first if isinstance(first, Call) and len(others) == 1 else None

    def _is_beside(self, event: Event) -> bool:
        if isinstance(event, Edit):
            return not event.slot and event.atom not in self._moved
        return isinstance(event, Fingerprints)

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
            if not self._records:
                self._waiting_since = time.monotonic()
            record, self._held = self._held, []  # whole, whatever becomes of it
            self._records.append(record)
            # where an atom has no base yet, its gradients did not travel: nobody could redo the record
            whole = all(map(self._has_base, range(len(self.census.atoms))))
            if self.on_record is not None and whole:
                entries = [(held.entry.events, held.entry.payload) for held in record]
                self.on_record(_seal(record), entries)

    def _has_base(self, atom: int) -> bool:
        """Whether an atom is based, or will be by a record that is here but not yet redone."""
        return self.replica.based[atom] or atom in self._arriving

    def _can_redo(self, record: list[_Held]) -> bool:
        """Only optimizer calls need torch; a base can be taken in while torch still loads."""
        return all(
            event.optimizer in self.advances
            for held in record
            for event in held.entry.events
            if isinstance(event, Call) and self._replays(event)
        )

    def forget(self, *, keep: bool = False) -> None:
        """Start over: the trainer will send everything again. `keep` the state until it begins to: nothing
        newer may ever come, and the store may not have it."""
        self._skipping = bool(self._held) and not self.gap
        self.gap = self.in_doubt = False
        self.ring.release_read()
        self._arriving.clear()
        self._edits.clear()
        self._fold_asked = False
        self._held.clear()
        self._records.clear()
        self._kept = keep
        if not keep:
            self._give_up_state()
        self.ring.request_atoms(None)

    def _give_up_state(self) -> None:
        self._kept = False
        self.tail.clear()
        self.drifted.clear()
        self.replica.forget()

    @property
    def waits_for_base(self) -> bool:
        """What comes next, if it comes, has nothing to do with the state that is here."""
        return self._kept or (self.gap and not self._records)

    def stay(self) -> None:
        """The trainer is gone and will send nothing anew: the state that is here is the newest."""
        self.gap = self._kept = False
        self._held.clear()
        self.ring.skip()

    def drop_unsealed(self) -> None:
        """The trainer is gone: what it had not sealed never happened."""
        self._held.clear()
        if self.ring.taken > self.ring.released:
            self.ring.release(self.ring.taken - 1)

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

    def _apply(self, record: list[_Held]) -> None:
        """Redo one whole record."""
        entries = [held.entry for held in record]
        events = [(event, entry) for entry in entries for event in entry.events]
        seal = _seal(record)
        self._check_order(seal)
        based_at = {
            atom: position
            for position, (event, _) in enumerate(events)
            if isinstance(event, Rebase)
            for atom in event.atoms
        }
        for position, (event, entry) in enumerate(events):
            if not isinstance(event, Edit):
                self._write_edits()
            self._redo(event, entry, seal.step, position < based_at.get(_atom(event), -1))
            if isinstance(event, Rebase):
                self._rebase(event, [e for e, _ in events[:position]])
        self._keep_tail(events, based_at)
        self.session = after_seal(self.session, seal)
        for prints, payload in _prints(record):
            self._compare(prints, payload, seal.step)
        self.ring.release(entries[-1].ticket)
        self.records += 1

    def _check_order(self, seal: Seal) -> None:
        if self.replica.complete and seal.after != self.step:
            raise CorruptData(f"record {seal.after} -> {seal.step}: the replica is at {self.step}")

    def _redo(self, event: Event, entry: Entry, step: int, is_base: bool) -> None:
        if isinstance(event, Edit | SlotValues):
            atom = event.atom
            if self._belongs_to_tail(event) and not is_base:
                return  # stays in the log, in its order among the calls
            if isinstance(event, SlotValues):
                self.replica.set_values(atom, event.optimizer, event.values)
            elif self.replica.based[atom]:
                self._edits.append((event, entry.payload))
            if isinstance(event, Edit) and event.slot == GRADIENT:
                return  # nothing that an optimizer has is any different
            self.replica.versions[atom] = step
            self._slots_changed(atom)
        elif isinstance(event, Call) and self._replays(event):
            for atom in self.advances[event.optimizer].calls([(event, entry.payload)])[0]:
                self.replica.versions[atom] = step
            self.calls += 1

    def _belongs_to_tail(self, event: Event) -> bool:
        """Whether a change of an atom has its place among calls that only the user's optimizer can replay. A
        gradient that waits for a later call is always the newest."""
        if isinstance(event, Edit) and event.slot == GRADIENT:
            return False
        return isinstance(event, Edit | SlotValues) and event.atom in self._log_atoms

    def _write_edits(self) -> None:
        """Edits that follow each other are copied together, by several threads."""
        edits, self._edits = self._edits, []
        self.replica.write(edits)

    def _replays(self, call: Call) -> bool:
        return self.census.optimizers[call.optimizer].mode is Mode.REPLAY

    def _rebase(self, rebase: Rebase, before: list[Event]) -> None:
        for atom, version in zip(rebase.atoms, rebase.versions, strict=True):
            own = _sent_last(before, atom)
            self.replica.drop_slots(atom, {e.slot for e in own if isinstance(e, Edit)})
            kept = {(atom, e.optimizer) for e in own if isinstance(e, SlotValues)}
            for key in [k for k in self.replica.values if k[0] == atom and k not in kept]:
                del self.replica.values[key]
            self.replica.versions[atom] = version
            self.replica.based[atom] = True
            self._arriving.discard(atom)
            self.drifted.discard(atom)
            self._slots_changed(atom)
        if self._log_atoms & set(rebase.atoms):
            self.tail.clear()
            self._fold_asked = False

    def _slots_changed(self, atom: int) -> None:
        for advance in self.advances.values():
            advance.slots_changed(atom)

    def _keep_tail(self, events: list[tuple[Event, Entry]], based_at: dict[int, int]) -> None:
        """Log what only the user's own optimizer can redo."""
        if not self._log_atoms:
            return
        start = max((based_at.get(atom, -1) for atom in self._log_atoms), default=-1)
        by_entry: dict[int, tuple[Entry, list[Event]]] = {}
        for event, entry in events[start + 1 :]:
            logged = self._belongs_to_tail(event)
            called = (
                isinstance(event, Call) and self.census.optimizers[event.optimizer].mode is Mode.LOG
            )
            if logged or called:
                by_entry.setdefault(entry.ticket, (entry, []))[1].append(event)
        frames = [frame_entry(*pack_events(k), entry.payload) for entry, k in by_entry.values()]
        if frames:
            self.tail.append((1, b"".join(frames)))
        if self.tail_bytes > max(_TAIL_BYTES_MIN, self._log_state_bytes()) and not self._fold_asked:
            self._fold_asked = True
            self.ring.request_atoms(self._log_atoms | self.drifted)  # a repair may not be seen yet

    @property
    def tail_bytes(self) -> int:
        return sum(len(data) for _, data in self.tail)

    @property
    def tail_steps(self) -> int:
        return sum(steps for steps, _ in self.tail)

    def _log_state_bytes(self) -> int:
        return sum(p.bytes for p in self.replica.places.values() if p.atom in self._log_atoms)

    def _compare(self, prints: Fingerprints, payload: memoryview, step: int) -> None:
        """The replica must have the digests that the trainer's state had at this step."""
        expected = payload[prints.at : prints.at + 8 * len(prints.tensors)].cast("q")
        known = {
            key: number
            for key, number in zip(prints.tensors, expected, strict=True)
            if self.replica.based[key[0]] and key[0] not in self._log_atoms | self.drifted
        }
        found = self.replica.digests(list(known))
        wrong = sorted({key[0] for key, number in known.items() if found.get(key) != number})
        self.prints_checked += 1
        if wrong:
            names = ", ".join(self.census.atoms[atom].name for atom in wrong[:3])
            log.warning("replica_drifted step=%d atoms=%d first=%s", step, len(wrong), names)
            self.repairs += len(wrong)
            self.repaired = [self.census.atoms[atom].name for atom in wrong[:_REPAIRED_NAMED]]
            self.drifted.update(wrong)
            self._fold_asked = False  # one request replaces the other: a fold is asked for again
            self.ring.request_atoms(self.drifted)

    def session_values(self) -> SessionValues:
        """The session with the slots that are no tensors, as it is stored and handed over."""
        values = tuple((atom, opt, data) for (atom, opt), data in self.replica.values.items())
        return msgspec.structs.replace(self.session, values=values)


def _atom(event: Event) -> int:
    return event.atom if isinstance(event, Edit | SlotValues) else -1


def _sent_last(events: list[Event], atom: int) -> list[Event]:
    """The newest of an atom: its value always comes before its slots."""
    own = [e for e in events if _atom(e) == atom]
    starts = [i for i, e in enumerate(own) if isinstance(e, Edit) and not e.slot and not e.start]
    return own[starts[-1] :] if starts else own


def _seal(record: list[_Held]) -> Seal:
    seal = record[-1].entry.events[-1]
    if not isinstance(seal, Seal):
        raise CorruptData(f"record of step {record[-1].entry.step}: does not end with a seal")
    return seal


def _prints(record: list[_Held]) -> list[tuple[Fingerprints, memoryview]]:
    return [
        (event, held.entry.payload)
        for held in record
        for event in held.entry.events
        if isinstance(event, Fingerprints)
    ]


def _calls(held: _Held) -> bool:
    return any(isinstance(event, Call) for event in held.entry.events)


def _edits(record: list[_Held]) -> list[tuple[Edit, memoryview]]:
    return [
        (event, held.entry.payload)
        for held in record
        for event in held.entry.events
        if isinstance(event, Edit)
    ]
