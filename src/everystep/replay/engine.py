"""Applies records to a target, event by event, in their order.

A target is state that records move on: the replica of a shadow, or the live tensors of a resume. Nothing in
here knows where the state lies. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

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

P = TypeVar("P")  # payload: bytes of the host, or of a device
P_contra = TypeVar("P_contra", contravariant=True)
Entry = tuple[Sequence[Event], P]
Record = Sequence[Entry[P]]  # all entries of a step, with the seal at the end of the last


@dataclass
class Sent:
    """What a record has sent of an atom since its value, which always comes before its slots."""

    slots: set[str] = field(default_factory=set)
    values: dict[int, bytes] = field(
        default_factory=dict
    )  # by optimizer: slots that are no tensors


class Target(Protocol[P_contra]):
    """State that records move on."""

    def write(self, edits: Iterable[tuple[Edit, P_contra]]) -> None:
        """Edits that follow each other."""

    def set_values(self, event: SlotValues) -> None: ...

    def replay_calls(
        self, calls: Sequence[tuple[Call, P_contra]], base: Any = None
    ) -> list[list[int]]:
        """Apply calls in their order; returns the atoms that each of them moved. `base` is a copy of the
        state before them, to be filled on the way."""

    def rebase(self, rebase: Rebase, sent: dict[int, Sent]) -> None:
        """What was sent is all there is of these atoms."""

    def seal(self, seal: Seal, changed: set[int]) -> None:
        """The record is applied. `changed`: its atoms, but for those that were based in it and not changed
        after that."""

    def compare(self, prints: Fingerprints, payload: P_contra) -> None:
        """Hold the sealed state against the digests of the trainer's."""


class Engine(Generic[P]):
    """Owned by whoever owns the target. What it remembers is of the record that is being applied."""

    def __init__(self, target: Target[P]) -> None:
        self._target = target
        self.begin_record()

    def apply(self, entries: Iterable[Entry[P]]) -> None:
        """Entries of whole records, or of the tail of a log."""
        stream = ((event, payload) for events, payload in entries for event in events)
        for kind, rows in groupby(stream, key=lambda row: type(row[0])):
            if kind is Edit:
                self._target.write(self._edits(rows))
                continue
            for event, payload in rows:
                self._apply(event, payload)

    def apply_together(self, records: Sequence[Record[P]], base: Any = None) -> None:
        """Plain records (`plain_run`): one pass over the state replays their calls, whatever else they hold
        follows. `base` is filled by the pass, with the state before it."""
        calls = [
            (event, payload)
            for record in records
            for events, payload in record
            for event in events
            if isinstance(event, Call)
        ]
        moved = self._target.replay_calls(calls, base)
        for record, atoms in zip(records, moved, strict=True):
            self._changed.update(atoms)
            self.apply([(_without_calls(events), payload) for events, payload in record])

    def begin_record(self) -> None:
        """Nothing of a record that failed in its midst belongs to the next one."""
        self._sent: dict[int, Sent] = {}
        self._changed: set[int] = set()
        self._prints: list[tuple[Fingerprints, P]] = []

    def _apply(self, event: Event, payload: P) -> None:
        target = self._target
        if isinstance(event, SlotValues):
            self._of(event.atom).values[event.optimizer] = event.values
            self._changed.add(event.atom)
            target.set_values(event)
        elif isinstance(event, Call):
            self._changed.update(*target.replay_calls([(event, payload)]))
        elif isinstance(event, Rebase):
            target.rebase(event, {atom: self._of(atom) for atom in event.atoms})
            self._changed.difference_update(event.atoms)
        elif isinstance(event, Fingerprints):
            self._prints.append((event, payload))  # of the state at the seal
        elif isinstance(event, Seal):
            prints, changed = self._prints, self._changed
            self.begin_record()
            target.seal(event, changed)
            for row in prints:
                target.compare(*row)

    def _edits(self, rows: Iterable[tuple[Event, P]]) -> Iterator[tuple[Edit, P]]:
        for edit, payload in rows:
            assert isinstance(edit, Edit)
            if edit.slot != GRADIENT:  # nothing that an optimizer has is any different
                self._changed.add(edit.atom)
                if edit.slot:
                    self._of(edit.atom).slots.add(edit.slot)
                elif edit.start == 0:
                    self._sent[edit.atom] = Sent()
            yield edit, payload

    def _of(self, atom: int) -> Sent:
        return self._sent.setdefault(atom, Sent())


def seal_of(record: Record[Any]) -> Seal:
    seal = record[-1][0][-1]
    if not isinstance(seal, Seal):
        raise CorruptData(f"replay a record: its last event is a {type(seal).__name__}, no seal")
    return seal


def plain_run(records: Iterable[Record[Any]], moved: Container[int], longest: int) -> int:
    """How many of the first records one pass can replay: each is a call, and what the call does not touch.
    `moved`: the atoms of all optimizers."""
    run = 0
    for record in records:
        if run == longest or not _is_plain(record, moved):
            break
        run += 1
        if any(isinstance(event, Fingerprints) for events, _ in record for event in events):
            break  # compared before anything moves on
    return run


def _is_plain(record: Record[Any], moved: Container[int]) -> bool:
    """Fingerprints, values of buffers and of frozen parameters stand before or after the call alike."""
    events = [e for events, _ in record for e in events if not _is_beside(e, moved)]
    return len(events) == 2 and isinstance(events[0], Call)


def _is_beside(event: Event, moved: Container[int]) -> bool:
    if isinstance(event, Edit):
        return not event.slot and event.atom not in moved
    return isinstance(event, Fingerprints)


def _without_calls(events: Iterable[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, Call)]
