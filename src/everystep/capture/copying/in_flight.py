"""Device memory that is kept alive until copies from it are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from everystep.device.copy_stream import CopyStream

_nbytes = attrgetter("nbytes")


class Hold(NamedTuple):
    side: CopyStream
    mark: Any
    tensors: Sequence[torch.Tensor]
    bytes: int


class InFlightBuffers:
    """Owned by the training thread; oldest first."""

    def __init__(self) -> None:
        self._holds: deque[Hold] = deque()
        self._old = 0
        self.bytes = 0

    def add(self, side: CopyStream, tensors: Sequence[torch.Tensor]) -> Any:
        """Keep the sources of what was just queued; returns the mark they are kept until."""
        mark = side.mark()
        size = sum(map(_nbytes, tensors))
        self._holds.append(Hold(side, mark, tensors, size))
        self.bytes += size
        return mark

    def release(self, keep_bytes: int = 0) -> None:
        """Free them, oldest first: the compute stream waits for the copies, so whatever comes to lie in this
        memory comes later."""
        while self._holds and (self.bytes > keep_bytes or not keep_bytes):
            self._release_oldest()

    def _release_oldest(self) -> None:
        hold = self._holds.popleft()
        self.bytes -= hold.bytes
        hold.side.wait_for_copy(hold.mark)
        self._old = max(0, self._old - 1)

    def grow_old(self) -> None:
        """A step is over: what is held now belongs to it."""
        self._old = len(self._holds)

    def release_old(self) -> None:
        """Free what belongs to steps that are over."""
        for _ in range(self._old):
            self._release_oldest()

    def clear(self) -> None:
        """Everything has been copied."""
        self._holds.clear()
        self.bytes = 0
