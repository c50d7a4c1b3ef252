"""Trainer, ring, shadow and recovery in one process: hundreds of small programs a minute can be recorded and
brought back here, where processes of their own would take seconds each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from everystep.capture.census import take_census
from everystep.capture.state import UserState
from everystep.capture.subject import Subject
from everystep.capture.tap import Tap
from everystep.capture.versions import Versions
from everystep.core.cadence import RestBetweenBases
from everystep.core.census import Mode
from everystep.core.events import Event, Seal
from everystep.core.geometry import Geometry
from everystep.core.phases import Phase
from everystep.format.base import Point, SessionValues, after_seal
from everystep.format.entry import frame_entry
from everystep.format.log import LoggedRecord
from everystep.format.slot import pack_events
from everystep.lane.arena import SharedMemory
from everystep.lane.ring import RingReader, RingWriter
from everystep.recover.loader import Loader
from everystep.recover.point import RestorePoint
from everystep.shadow.advance import Advance
from everystep.shadow.intake import Intake
from everystep.shadow.replica import Replica

from .harness import Job

_GEOMETRY = Geometry(slots=8, slot_bytes=64 << 10)


class Desk:
    """Records a job, as `attach` would; `seal` ends a step and lets the shadow take it in."""

    def __init__(self, job: Job, *, log: bool = True) -> None:
        self._subject = Subject(
            job.model, job.optimizer, UserState(job.state), log=log, override=()
        )
        self.live = self._subject.census()
        self._memory = SharedMemory.create(_GEOMETRY.bytes, "desk")
        self._ring = RingWriter(self._memory, _GEOMETRY, nonce=5)
        self.replica = Replica(self.live.census, None)
        self.replica.reserve_values()
        nothing = SessionValues(0, b"", b"", (), ())
        self.intake = Intake(
            self.live.census, RingReader(self._memory, _GEOMETRY), self.replica, nothing
        )
        self.records: list[tuple[Seal, LoggedRecord]] = []
        self.intake.on_record = self._keep
        for index, spec in enumerate(self.live.census.optimizers):
            if spec.mode is Mode.REPLAY:
                self.intake.state.advances[index] = Advance(self.live.census, self.replica)
        self._subject.turn.begin(self._subject.sealed_values())
        self.tap = Tap(
            self._subject,
            self._ring,
            step=0,
            versions=Versions([0] * len(self.live.tensors)),
            guard=lambda work: work,
            may_wait=self._take_in,
            rest=RestBetweenBases(1),
            budget_percent=5.0,
            fingerprint_every=1,
        )
        self.tap.hooks.install()
        self.tap.record.bases.add(fresh=True)
        self.seal(0)

    def seal(self, step: int) -> None:
        self.tap.seal(step, self._subject.sealed_values())
        self.tap.record.land()  # a device's copies are done when it says so
        if self.tap.record.copier.sides and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        assert self.tap.phase is Phase.RECORDING
        self._take_in()
        assert self.intake.step == step and self.intake.state.repairs == 0

    def _take_in(self, *_: object) -> bool:
        while self.intake.take(may_apply=True):
            pass
        return True

    def _keep(self, seal: Seal, entries: list[tuple[list[Event], memoryview]]) -> None:
        body = b"".join(frame_entry(*pack_events(events), payload) for events, payload in entries)
        self.records.append(
            (seal, LoggedRecord(seal.step, seal.after, memoryview(bytearray(body))))
        )

    def base(self) -> RestorePoint:
        """What the shadow holds now, copied."""
        places = [
            t.at(memoryview(bytearray(self.replica.view(key))))
            for key, t in self.replica.places.items()
        ]
        return RestorePoint(
            Point(1, self.intake.step),
            "shadow",
            self.live.census,
            self.intake.state.session_values(),
            lambda: iter(places),
            memoryview(bytearray(self.intake.state.tail.data)),
            self.intake.state.tail.steps,
            [],
        )

    def behind(self, base: RestorePoint) -> RestorePoint:
        """A base and the log of everything since then."""
        session, records = base.session, []
        for seal, record in self.records:
            if seal.step > base.point.step:
                session = after_seal(session, seal)
                records.append(record)
        return base._replace(session=session, log=records)

    def close(self) -> None:
        self.tap.remove()


def load(found: RestorePoint, build: Callable[[], Job], *, log: bool = True) -> Job:
    """The found point in freshly built objects."""
    job = build()
    live = take_census(job.model, job.optimizer, log=log)
    Loader(found, live, Path("desk")).load()
    UserState(job.state).restore(found.session.state)
    return job
