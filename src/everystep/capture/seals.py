"""What a seal says beside the step's calls, edits and bases: user state, random states, values of param
groups, gradients that wait, fingerprints. What has not changed since the last seal is not said again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from everystep.capture.pending import PendingGradients
from everystep.capture.record import OpenRecord
from everystep.capture.rng import capture_rng
from everystep.capture.subject import Subject
from everystep.capture.turn import SealedValues
from everystep.capture.watching.fingerprints import FingerprintSender
from everystep.core.events import Seal


class SealSender:
    """Owned by the training thread."""

    def __init__(self, record: OpenRecord, subject: Subject, fingerprint_every: int) -> None:
        self._record = record
        self._turn = subject.turn
        self._user_state = subject.user_state
        self._pending = PendingGradients(record.live, record.outbox)
        self._prints = FingerprintSender(
            record.live, record.outbox, record.copier, fingerprint_every
        )
        self._said = self._nothing = SealedValues(b"", b"", (b"",) * len(record.live.optimizers))

    def send(self, step: int, values: SealedValues, *, after: int, again: bool) -> None:
        """`again`: the step is sealed once more, and `after` is itself."""
        record, said = self._record, self._said
        rng, state, groups = values
        changed = (g if g != old else b"" for g, old in zip(groups, said.groups, strict=True))
        self._prints.turn()
        if not record.bases.atoms_left and self._prints.is_due(step):
            self._prints.send(step)
        pending = self._pending.send(self._turn.consumed_by, again=again)
        seal = Seal(
            step=step,
            after=after,
            rng=rng,
            state=state if state != said.state else b"",
            groups=tuple(changed),
            time_ns=time.monotonic_ns(),
            metric=self._user_state.metric,
            pending=pending,
        )
        size = (
            len(rng)
            + len(seal.state)
            + sum(map(len, groups))
            + 3 * max(map(len, msgspec.structs.astuple(pending)))
        )
        record.outbox.room(0, size)
        record.outbox.add(seal)
        record.outbox.seal()
        self._said = values

    def skip(self) -> None:
        """A step is over that no seal tells of."""
        self._pending.turn()

    def say_all_again(self) -> None:
        """The shadow starts over, and may never have taken in what seals have said: the next one says it."""
        self._said = self._nothing

    def nothing_happened(self) -> bool:
        """True if a seal now would say exactly what the last one said."""
        return (
            not self._turn.calls
            and capture_rng() == self._said.rng
            and self._user_state.collect() == self._said.state
            and not self._pending.changed()
            and not self._record.watch.differs()
        )

    def has_moved_on(self) -> bool:
        """Whether tensors, slots or gradients are no longer what the last seal saw."""
        gradients = self._pending.have_moved_on(self._turn.consumed_by)
        return gradients or self._record.live.follow() or self._record.watch.differs()

    @property
    def rates(self) -> Mapping[str, Any]:
        return {
            "fingerprint_every": self._prints.every,
            "unmoved_gradients": self._pending.unmoved,
        }
