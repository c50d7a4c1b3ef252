"""Device memory that is kept alive until copies from it are done."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

from everystep.capture.side import Side


class Hold(NamedTuple):
    side: Side
    mark: Any
    tensors: list[torch.Tensor]


class Holds:
    """Owned by the training thread; oldest first."""

    def __init__(self) -> None:
        self._holds: deque[Hold] = deque()
        self._old = 0

    def add(self, side: Side, tensors: list[torch.Tensor]) -> Any:
        """Keep the sources of what was just queued; returns the mark they are kept until."""
        mark = side.mark()
        self._holds.append(Hold(side, mark, tensors))
        return mark

    @property
    def bytes(self) -> list[int]:
        """What each part keeps."""
        return [sum(t.nbytes for t in hold.tensors) for hold in self._holds]

    def release(self, keep: int = 0) -> None:
        """Let go, oldest first: the compute stream waits for the copies, so whatever comes to lie in this
        memory comes later."""
        while len(self._holds) > keep:
            hold = self._holds.popleft()
            hold.side.hold_back(hold.mark)
            self._old = max(0, self._old - 1)

    def grow_old(self) -> None:
        """A step is over: what is held now belongs to it."""
        self._old = len(self._holds)

    def release_old(self) -> None:
        """Let go of what belongs to steps that are over."""
        self.release(keep=len(self._holds) - self._old)

    def clear(self) -> None:
        """Everything has been copied."""
        self._holds.clear()
