"""The state that the replica is in, as a target of replay. Owned by the shadow's main thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from everystep.core.census import Mode
from everystep.core.events import GRADIENT, Call, Edit, Fingerprints, Rebase, Seal, SlotValues
from everystep.errors import CorruptData
from everystep.format.base import SessionValues, after_seal
from everystep.replay.engine import Engine, Record, Sent, seal_of
from everystep.shadow.copies import BaseCopy
from everystep.shadow.replica import Replica
from everystep.shadow.tail import Tail

log = logging.getLogger(__name__)

_TAIL_BYTES_MIN = 64 << 20
_REPAIRED_NAMED = 10
Calls = Sequence[tuple[Call, memoryview]]


class Advance(Protocol):
    """Moves the atoms of one optimizer."""

    copies: bool  # whether a pass can fill a base on its way

    def calls(self, calls: Calls, base: BaseCopy | None = None) -> list[list[int]]:
        """Apply calls in their order; returns the atoms that each of them moved."""

    def slots_changed(self, atom: int) -> None:
        """The atom's slots were written or replaced from outside."""


class ReplicaState:
    """`request_atoms` asks the trainer to re-base atoms; None: no others than it wants to."""

    def __init__(
        self,
        replica: Replica,
        session: SessionValues,
        request_atoms: Callable[[set[int] | None], None],
    ) -> None:
        self.census = replica.census
        self.replica = replica
        self.session = session
        self.advances: dict[int, Advance] = {}  # by optimizer; torch's come once it is loaded
        self.tail = Tail(self.census)
        self.calls = 0  # of optimizers that were replayed here: the first ones make slots
        self.prints_checked = 0
        self.drifted: set[int] = set()
        self.repairs = 0
        self.repaired: list[str] = []  # atoms of the newest repair
        self._request_atoms = request_atoms
        self._fold_asked = False
        self._engine = Engine(self)

    @property
    def step(self) -> int:
        return self.session.step

    @property
    def whole(self) -> bool:
        """Every atom has a base and a seal has closed it: a state to resume from."""
        return self.replica.complete and bool(self.session.rng)

    def session_values(self) -> SessionValues:
        """The session with the slots that are no tensors, as it is stored and handed over."""
        values = tuple((atom, opt, data) for (atom, opt), data in self.replica.values.items())
        return msgspec.structs.replace(self.session, values=values)

    def can_replay(self, record: Record[memoryview]) -> bool:
        """Only optimizer calls need torch; a base can be taken in while torch still loads."""
        return all(
            event.optimizer in self.advances
            for events, _ in record
            for event in events
            if isinstance(event, Call) and self._replays(event)
        )

    def replay(self, record: Record[memoryview]) -> None:
        self._check_order([record])
        self._engine.begin_record()
        own, logged = self.tail.split(record)
        self._engine.apply(own)
        if self.tail.atoms:
            self.tail.add(logged)
            self._ask_for_a_shorter_tail()

    def replay_together(self, records: Sequence[Record[memoryview]], base: BaseCopy | None) -> None:
        """Several plain records in one pass over the state."""
        self._check_order(records)
        self._engine.begin_record()
        self._engine.apply_together(records, base)

    def forget_requests(self) -> None:
        """The trainer will re-base everything."""
        self._fold_asked = False
        self._request_atoms(None)

    def give_up(self) -> None:
        """Records were lost: what is here can no longer be moved on."""
        self.tail.clear()
        self.drifted.clear()
        self.replica.forget()

    # ------------------------------------------------------------------ as a target of replay

    def write(self, edits: Iterable[tuple[Edit, memoryview]]) -> None:
        """Edits that follow each other are copied together, by several threads."""
        rows = list(edits)
        self.replica.write([row for row in rows if self.replica.based[row[0].atom]])
        for atom in {edit.atom for edit, _ in rows if edit.slot != GRADIENT}:
            self._slots_changed(atom)

    def set_values(self, event: SlotValues) -> None:
        self.replica.set_values(event.atom, event.optimizer, event.values)
        self._slots_changed(event.atom)

    def replay_calls(self, calls: Calls, base: BaseCopy | None = None) -> list[list[int]]:
        first, _ = calls[0]
        if not self._replays(first):
            return [[] for _ in calls]
        self.calls += len(calls)
        return self.advances[first.optimizer].calls(calls, base)

    def rebase(self, rebase: Rebase, sent: dict[int, Sent]) -> None:
        for atom, version in zip(rebase.atoms, rebase.versions, strict=True):
            self.replica.keep_only(atom, sent[atom].slots, set(sent[atom].values))
            self.replica.versions[atom] = version
            self.replica.based[atom] = True
            self.drifted.discard(atom)
            self._slots_changed(atom)
        if self.tail.atoms & set(rebase.atoms):
            self.tail.clear()
            self._fold_asked = False

    def seal(self, seal: Seal, changed: set[int]) -> None:
        for atom in changed:
            self.replica.versions[atom] = seal.step
        self.session = after_seal(self.session, seal)

    def compare(self, prints: Fingerprints, payload: memoryview) -> None:
        """The replica must have the digests that the trainer's state had at this step."""
        expected = payload[prints.at : prints.at + 8 * len(prints.tensors)].cast("q")
        known = {
            key: number
            for key, number in zip(prints.tensors, expected, strict=True)
            if self.replica.based[key[0]] and key[0] not in self.tail.atoms | self.drifted
        }
        found = self.replica.digests(list(known))
        wrong = sorted({key[0] for key, number in known.items() if found.get(key) != number})
        self.prints_checked += 1
        if wrong:
            self._repair(wrong)

    # ------------------------------------------------------------------ inside

    def _replays(self, call: Call) -> bool:
        return self.census.optimizers[call.optimizer].mode is Mode.REPLAY

    def _check_order(self, records: Sequence[Record[memoryview]]) -> None:
        at = self.step
        for seal in map(seal_of, records):
            if self.replica.complete and seal.after != at:
                raise CorruptData(f"record {seal.after} -> {seal.step}: the replica is at {at}")
            at = seal.step

    def _slots_changed(self, atom: int) -> None:
        for advance in self.advances.values():
            advance.slots_changed(atom)

    def _repair(self, wrong: list[int]) -> None:
        """Have the trainer send atoms that differ from its own."""
        names = [self.census.atoms[atom].name for atom in wrong]
        log.warning(
            "replica_drifted step=%d atoms=%d first=%s",
            self.step,
            len(wrong),
            ", ".join(names[:3]),
        )
        self.repairs += len(wrong)
        self.repaired = names[:_REPAIRED_NAMED]
        self.drifted.update(wrong)
        self._fold_asked = False  # one request replaces the other: a fold is asked for again
        self._request_atoms(self.drifted)

    def _ask_for_a_shorter_tail(self) -> None:
        """Its atoms, re-based, need none of it."""
        places = self.replica.places.values()
        state_bytes = sum(p.bytes for p in places if p.atom in self.tail.atoms)
        if self.tail.nbytes > max(_TAIL_BYTES_MIN, state_bytes) and not self._fold_asked:
            self._fold_asked = True
            self._request_atoms(self.tail.atoms | self.drifted)  # a repair may not be seen yet
