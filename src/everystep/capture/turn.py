"""The turn since the last seal: whether an optimizer was called in it, what the seal before it said, and
whether training is still where that seal saw it.

None of it depends on a shadow: a turn counts while nothing is recorded, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.glance import Hints
from everystep.capture.pending import GradientStamp, gradient_stamp
from everystep.capture.rng import capture_rng
from everystep.capture.state import UserState


class Moment(NamedTuple):
    """What a seal says beside tensors. A step that is recorded again after its seal (a base is wanted, or the
    shadow asks for a part) says the same: the turn since then may have drawn numbers or a batch."""

    rng: bytes
    state: bytes  # the user's, encoded

    @classmethod
    def now(cls, user_state: UserState, rng: bytes | None = None) -> Moment:
        return cls(capture_rng() if rng is None else rng, user_state.collect())


class Looks(NamedTuple):
    """How tensors and gradients look: equal as long as training has not moved on. Writes through `.data` do
    not show; recorded steps are compared by the watch, which sees more."""

    atoms: Hints
    gradients: GradientStamp

    @classmethod
    def of(cls, live: LiveCensus) -> Looks:
        return cls(Hints(live.tensors), gradient_stamp(live))


class OpenTurn:
    """Owned by the training thread."""

    def __init__(self) -> None:
        self.calls = 0  # of optimizers, since the last seal
        self.sealed: Moment | None = None  # what that seal said; None: it could not be told
        self._live: LiveCensus | None = None
        self._looks: Looks | None = None  # of a seal that was not recorded
        self._handles: list[Any] = []

    def count(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Count their calls from here on."""
        self._handles = [o.register_step_post_hook(self._count) for o in optimizers]

    @property
    def hook_ids(self) -> set[int]:
        return {handle.id for handle in self._handles}

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def begin(self, sealed: Moment | None) -> None:
        """What is live now is sealed."""
        self.calls, self.sealed = 0, sealed
        self._live = self._looks = None

    def look(self, live: LiveCensus | None) -> None:
        """Remember how a seal looks that may have to be recorded later. None: it is recorded."""
        self._live, self._looks = live, None if live is None else Looks.of(live)

    def has_moved_on(self) -> bool | None:
        """Whether training has left the state of the last seal; None: who has recorded it can tell."""
        if self.calls or self.sealed is None:
            return True
        return None if self._live is None else Looks.of(self._live) != self._looks

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
