"""Decides when the replica goes to the store, and takes the snapshot for it. Main thread only."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from everystep.core.cadence import base_is_due
from everystep.core.events import GRADIENT
from everystep.core.forecast import base_bytes
from everystep.core.sizes import size
from everystep.lane.host import read_facts
from everystep.options import Options
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.copies import BaseCopy, Room
from everystep.shadow.intake import Intake
from everystep.store.snapshot import Snapshot

log = logging.getLogger(__name__)

_DOCUMENTS_BYTES = 64 << 10  # of a base, beside its tensors
_PART_SECONDS = 60.0
_TELL_SECONDS = 300.0  # from one warning of a limit to the next


class BaseScheduler:
    def __init__(self, options: Options, intake: Intake, base_writer: BaseWriter) -> None:
        self.options = options
        self._intake = intake
        self._base_writer = base_writer
        self._writes_in_place = False
        self._room: Room | None = None  # for the next copy
        self._parted_at: int | None = None
        self._parts_since: float | None = None
        self.wanted: BaseCopy | None = None  # the next pass over the state should fill it
        self._aside: BaseCopy | None = None  # being filled beside the main thread
        self.delayed = ""  # which limit holds the next base up
        self._tell_at = 0.0
        self._begun = (0, 0.0)  # step and time of the base that is written

    @property
    def has_news(self) -> bool:
        """A whole state that the store does not have yet, and that is not known to be wrong."""
        durable = self._base_writer.state.durable
        sound = self._intake.whole and not self._intake.drifted
        return sound and (durable is None or self._intake.step > durable.step)

    @property
    def base_bytes(self) -> int:
        """What the next base will take on the disk, rather too much: checksums, and whole blocks."""
        data = (
            self._to_come_bytes()
            + self._intake.state.tail.nbytes
            + len(self._intake.state.session.state)
        )
        return data + data // 16 + _DOCUMENTS_BYTES

    def _to_come_bytes(self) -> int:
        """Of all that training moves, also what it has not moved yet since the last base, with the slots that
        first steps make."""
        intake, census = self._intake, self._intake.replica.census
        moved = {atom for spec in census.optimizers for atom in spec.atoms}
        counted = [p for _, p in intake.replica.counting(intake.state.session.pending)]
        here = sum(p.bytes for p in counted if p.atom in moved or self._changed(p.atom))
        if intake.state.calls:
            return here
        still = (a for a in range(len(census.atoms)) if a not in moved and not self._changed(a))
        return max(here, base_bytes(census) - sum(census.atoms[a].bytes for a in still))

    @property
    def has_begun(self) -> bool:
        """A base of this run is in the store, or on its way there while replay goes on."""
        base_writer = self._base_writer
        state = base_writer.state
        begun = state.durable is not None or bool(base_writer.trouble.problem)
        return begun or (bool(state.term) and base_writer.busy and not self.holds_still)

    @property
    def holds_still(self) -> bool:
        """The writer reads the replica itself: nothing may change until it is done."""
        filling = self._aside is not None and not self._aside.filled
        return self._base_writer.reads_snapshot and (filling or self._writes_in_place)

    def save_before_reset(self) -> bool:
        """The replica is about to be given up: have it written; True once its memory may change. A write that
        has failed is tried again until something else comes, for all that is known."""
        if self.holds_still:
            return False
        self.wanted = None  # who filled it later would find another state
        if (
            not self.has_news
            or self._parted_at == self._intake.step
            or self._base_writer.trouble.fenced
        ):
            self._parts_since = None
            return True
        self._parts_since = self._parts_since or time.monotonic()
        if not self._base_writer.busy:
            self._parted_at = self._intake.step
            self._start(copy=self._can_afford_copy())
        elif time.monotonic() - self._parts_since > _PART_SECONDS:
            self._parts_since = None
            return True  # a store that hangs must not keep the trainer from sending a new base
        return False

    def look_after_copy(self) -> None:
        """Write the copy that a pass has filled, or have it made aside if none came."""
        if self._intake.drifted:
            self.wanted = None  # what has shown now was probably wrong when it was copied
        wanted = self.wanted
        if wanted is None or self._base_writer.busy:
            return
        if wanted.filled:
            self.wanted, self._writes_in_place = None, False
            self._write(wanted.snapshot)
        elif wanted.overdue:
            self.wanted, self._aside, self._writes_in_place = None, wanted, False
            self._write(wanted.snapshot, before=wanted.aside)

    def write_now(self) -> None:
        """Make the newest state durable before anything else happens."""
        if self.has_news:
            self._base_writer.write_now(self._snapshot())

    def persist_if_due(
        self, *, asked: bool, last_words: bool, moving: bool, log_broken: bool = False
    ) -> None:
        """Start a write if one is due. While records still move the replica, a copy is written."""
        state = self._base_writer.state
        if self.wanted is not None and moving and not asked and not self._intake.waits_for_base:
            return  # it is under way
        if self._base_writer.trouble.fenced:
            self._room = None
        if self._base_writer.busy and state.term:
            self._look_at_rate()
        if not (self._base_writer.may_begin or (asked and self._base_writer.idle)):
            return
        if not state.term:
            self._base_writer.begin_claim()
            return
        due = self._room is not None or base_is_due(  # what was begun is done
            self.options,
            step=self._intake.step,
            durable_step=state.durable.step if state.durable else None,
            seconds_since_base=state.durable_age_seconds,
        )
        # what failed is tried until it is done, and a log with a gap is good for nothing but behind a base
        failed = bool(self._base_writer.trouble.problem) or log_broken
        urgent = asked or last_words or self._intake.waits_for_base
        self.delayed = self.delayed if due or failed else ""
        if self.has_news and (urgent or ((due or failed) and self._is_allowed())):
            self.delayed = ""
            self.wanted = None
            copy = moving and self._can_afford_copy()
            if copy and not urgent and not self._room_is_ready():
                return
            if copy and not urgent and self._intake.one_pass_replays_many:
                self.wanted = self._room_for_copy()
            if self.wanted is None:
                self._start(copy=copy)

    def _is_allowed(self) -> bool:
        """Whether a day's limit has room for a base. The first one and what was begun are not held up."""
        meter, durable = self._base_writer.meter, self._base_writer.state.durable
        limit = meter.limits.disk_bytes_per_day
        if not limit or durable is None or self._room is not None:
            return True
        need = self._changed_bytes()
        pause = meter.seconds_until(need)
        if pause != 0:
            when = "there is never room" if pause is None else f"for {pause / 60:.0f} min"
            self._delay(
                f"disk_bytes_per_day ({size(limit)}) holds up a base of {size(need)}: {when}"
            )
        return pause == 0

    def _look_at_rate(self) -> None:
        """Tell if bases are due faster than the limit of a second lets them be written."""
        rate, (step, began) = self._base_writer.meter.limits.disk_bytes_per_second, self._begun
        age = time.monotonic() - began
        if rate and base_is_due(
            self.options, step=self._intake.step, durable_step=step, seconds_since_base=age
        ):
            self._delay(f"disk_bytes_per_second ({size(rate)}) makes a base take {age:.0f} s")

    def _delay(self, why: str) -> None:
        self.delayed = f"{why}; raise it, or lengthen durable_every"
        if time.monotonic() > self._tell_at:
            self._tell_at = time.monotonic() + _TELL_SECONDS
            log.warning("base_delayed step=%d %s", self._intake.step, self.delayed)

    def _start(self, *, copy: bool) -> None:
        self._aside = self._room_for_copy() if copy else None
        self._room = None
        self._writes_in_place = self._aside is None
        if self._aside is None:
            self._write(self._snapshot())
        else:
            self._write(self._aside.snapshot, before=self._aside.aside)

    def _write(self, snapshot: Snapshot, before: Callable[[], None] | None = None) -> None:
        self._begun = (snapshot.step, time.monotonic())
        self._base_writer.start(snapshot, before)

    def _room_is_ready(self) -> bool:
        """Have memory made for a copy, and replay go on meanwhile."""
        if self._room is None:
            self._base_writer.spans.begin()  # it may slow training down
            with contextlib.suppress(OSError):  # refused: so will be the copy
                self._room = Room(self._changed_bytes())
        return self._room is None or self._room.ready

    def _room_for_copy(self) -> BaseCopy | None:
        """None where the kernel refuses the memory: then the replica holds still for the writer."""
        room, self._room = self._room, None
        try:
            return BaseCopy(self._snapshot(), self._base_writer, room)
        except OSError as error:
            log.warning("no_room_for_copy step=%d error=%s", self._intake.step, error)
            return None

    def _version(self, atom: int, slot: str) -> int:
        """A gradient that waits for a later step has nothing to do with when its atom last changed."""
        return self._intake.step if slot == GRADIENT else self._intake.replica.versions[atom]

    def _changed(self, atom: int) -> bool:
        replica = self._intake.replica
        return self._base_writer.version_of(atom, replica.census) != replica.versions[atom]

    def _changed_bytes(self) -> int:
        intake = self._intake
        places = (place for _, place in intake.replica.counting(intake.state.session.pending))
        return sum(place.bytes for place in places if self._changed(place.atom))

    def _can_afford_copy(self) -> bool:
        changed = self._changed_bytes()
        if self._room is not None and len(self._room.memory) >= changed:
            return True
        self._room = None  # the state has grown since: the first step makes an optimizer's slots
        return changed < read_facts().memory_available_bytes // 2

    def _snapshot(self) -> Snapshot:
        """The state as it is: views of the replica's own memory."""
        replica = self._intake.replica
        tensors = [
            msgspec.structs.replace(t.at(replica.view(key)), version=self._version(*key))
            for key, t in replica.counting(self._intake.state.session.pending)
        ]
        return Snapshot(
            step=self._intake.step,
            census=replica.census,
            tensors=tensors,
            session=self._intake.state.session_values(),
            tail=self._intake.state.tail.data,
            tail_steps=self._intake.state.tail.steps,
        )
