"""The turn since the last seal: which optimizers were called in it, what the seal before it said, and whether
training is still where that seal saw it.

None of it depends on a shadow: a turn counts while nothing is recorded, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.rng import capture_rng
from everystep.capture.state import UserState
from everystep.capture.watching.training_stamp import TrainingStamp


class SealedValues(NamedTuple):
    """What a seal says beside tensors. A step that is recorded again after its seal (a base is wanted, or the
    shadow asks for a part) says the same: the turn since then may have drawn numbers or a batch, or stepped a
    schedule."""

    rng: bytes
    state: bytes  # the user's, encoded
    groups: tuple[bytes, ...]  # of every optimizer, encoded

    @classmethod
    def now(cls, user_state: UserState, live: LiveCensus, rng: bytes | None = None) -> SealedValues:
        groups = tuple(values.encoded() for values in live.group_values)
        return cls(capture_rng() if rng is None else rng, user_state.collect(), groups)


class OpenTurn:
    """Owned by the training thread."""

    def __init__(self) -> None:
        self.calls = 0  # of optimizers, since the last seal
        self.sealed: SealedValues | None = None  # what that seal said; None: it could not be told
        self.consumed_by: set[int] = set()  # ids of the optimizers that stepped in the sealed turn
        self._stepped: set[int] = set()  # and since then
        self._stamp: TrainingStamp | None = None  # of a seal that was not recorded
        self._spare: TrainingStamp | None = None  # of the one before it, to be used again
        self._handles: list[Any] = []

    def count(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Count their calls from here on."""
        for optimizer in optimizers:
            handle = optimizer.register_step_post_hook(self._count)
            hooks: Any = optimizer._optimizer_step_post_hooks
            hooks.move_to_end(handle.id, last=False)  # another hook may raise: the step is done
            self._handles.append(handle)

    @property
    def hook_ids(self) -> set[int]:
        return {handle.id for handle in self._handles}

    def _count(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.calls += 1
        self._stepped.add(id(optimizer))

    def begin(self, sealed: SealedValues | None) -> None:
        """What is live now is sealed."""
        self.calls, self.sealed = 0, sealed
        self.consumed_by, self._stepped = self._stepped, set()
        self._spare, self._stamp = self._stamp, None

    def lose(self) -> None:
        """A seal did not come to its end: nobody knows what it would have said."""
        self.sealed = self._stamp = None

    def look(self, live: LiveCensus) -> None:
        """Remember how a seal looks that is not recorded, and may have to be."""
        spare, self._spare = self._spare, None
        stamp = spare if spare is not None and spare.live is live else TrainingStamp(live)
        try:
            stamp.mark()
            self._stamp = stamp
        except RuntimeError:  # inference tensors do not tell: the step counts as left at once
            self._stamp, self.sealed = None, None

    def has_moved_on(self) -> bool | None:
        """Whether training has left the state of the last seal; None: who has recorded it can tell."""
        if self.calls or self.sealed is None:
            return True
        return None if self._stamp is None else not self._stamp.still_hold(self.consumed_by)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
