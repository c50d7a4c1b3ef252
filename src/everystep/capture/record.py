"""The record that is being filled, and the phase that recording into this ring is in (`core/phases.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from everystep.capture.bases import BaseQueue
from everystep.capture.calls import CallLog
from everystep.capture.census import LiveCensus
from everystep.capture.copying.copier import Copier
from everystep.capture.copying.early import Guard
from everystep.capture.outbox import DropIfRingFull, Outbox
from everystep.capture.states import StateSender
from everystep.capture.versions import Versions
from everystep.capture.watching.suspicion import Suspicions
from everystep.capture.watching.watch import Watch
from everystep.core.phases import Cause, Phase, advance
from everystep.lane.ring import RingWriter

log = logging.getLogger("everystep")


class OpenRecord:
    """Owned by the training thread. Hooks and seals put into it what a step consumed; either may find that it
    has to be dropped."""

    def __init__(
        self,
        live: LiveCensus,
        ring: RingWriter,
        versions: Versions,
        suspicions: Suspicions,
        *,
        guard: Guard,
        may_wait: Callable[[float, bool], bool],
        budget_percent: float,
    ) -> None:
        self.live = live
        self.versions = versions
        self.phase = Phase.OPENING
        self.rebases = 0
        self.copier = Copier(ring, {t.device for t in live.tensors})
        self.outbox = Outbox(ring, self.copier, may_wait, self.land)
        self.watch = Watch(live, suspicions)
        self.bases = BaseQueue(live, ring, self.copier, budget_percent)
        ring_bytes = ring.geometry.slots * ring.geometry.capacity
        self.states = StateSender(
            live, ring_bytes, self.outbox, self.copier, self.watch, versions, self.bases
        )
        self.calls = CallLog(
            live,
            self.outbox,
            self.copier,
            self.states,
            versions,
            guard=guard,
            records=lambda: self.phase.records and self.phase is not Phase.OPENING,
            rebase=self.rebase,
            budget_percent=budget_percent,
        )

    def move(self, cause: Cause) -> None:
        """The one place where the phase changes."""
        before, self.phase = self.phase, advance(self.phase, cause)
        log.debug("phase from=%s cause=%s to=%s", before, cause, self.phase)

    def begin(self, target: int) -> None:
        """Events from here on belong to the step that will be sealed as `target`."""
        self.states.target = target
        self.outbox.begin(target)

    # ------------------------------------------------------------------ state

    def rebase(self, atoms: Iterable[int] | None = None, *, fresh: bool = False) -> None:
        """Have the state of these atoms (None: all) sent again. `fresh`: the shadow holds none of it."""
        self.move(Cause.REBASE)
        self.rebases += 1
        self.bases.add(atoms, fresh=fresh)

    def send_base(self) -> None:
        """The next slice of what is queued to be based."""
        with self.or_drop():
            self.states.base(self.calls.gradient_bytes)

    def release_point(self) -> None:
        """A module computes next: memory may be needed, and copies may be done meanwhile."""
        self.calls.lifetime.release_point()
        if not self.states.settle_if_landed():
            self.drop(told=True)

    def land(self) -> None:
        """State may change from here on, or must be in the ring now."""
        if not self.states.land():
            self.drop(told=True)

    # ------------------------------------------------------------------ dropping

    def or_drop(self) -> DropIfRingFull:
        return DropIfRingFull(self.drop)

    def drop(self, *, told: bool = False) -> None:
        """Stop recording; the shadow, once told, writes what it has and asks for a new base. `told`: a slot
        has become a gap."""
        self.move(Cause.DROP)
        self._pause(told=told)

    def rest(self) -> None:
        """The same on purpose, until the next base is due."""
        self.move(Cause.REST)
        self._pause(told=False)

    def _pause(self, *, told: bool) -> None:
        self.calls.rest()
        self.states.forget()
        self.copier.state.forget_pieces()
        self.outbox.abandon(told=told)

    def close(self) -> None:
        self.calls.rest()
        self.land()
        self.copier.close()
