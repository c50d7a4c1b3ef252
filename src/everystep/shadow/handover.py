"""Memory that goes from shadow to shadow: taken over when this one starts, handed on when it yields."""

from __future__ import annotations

from everystep.format.base import Point
from everystep.lane.arena import SharedMemory
from everystep.lane.control import Holding
from everystep.shadow.intake import Intake
from everystep.shadow.opening import Opening
from everystep.shadow.replica import Replica


class Handover:
    def __init__(self, opening: Opening, replica: Replica, intake: Intake) -> None:
        self._opening, self._replica, self._intake = opening, replica, intake
        self._tail: SharedMemory | None = None
        self._take_over()

    def _take_over(self) -> None:
        opening, holding = self._opening, self._opening.adopted
        if holding is None:
            self._replica.reserve_values()
            return
        self._replica.adopt(holding, [SharedMemory(fd) for fd in opening.extent_fds])
        self._intake.session = holding.session
        if opening.tail_fd >= 0:
            tail = SharedMemory(opening.tail_fd)
            self._intake.tail.append((holding.tail_steps, bytes(tail.view[: holding.tail_bytes])))
            tail.close()

    def holding(self, epoch: int) -> Holding:
        """Where everything lies. `epoch`: ours, if we have one; behind the point that we continue there may
        be steps that training has gone back from, which are not ours."""
        tail = b"".join(data for _, data in self._intake.tail)
        if tail:
            self._tail = SharedMemory.create(len(tail), "tail", self._opening.arena_dir)
            self._tail.view[: len(tail)] = tail
        session = self._intake.session_values()
        return self._replica.holding(
            line=Point(epoch, session.step) if epoch else self._opening.continues,
            session=session,
            tail_bytes=len(tail),
            tail_steps=self._intake.tail_steps,
        )

    def descriptors(self) -> list[int]:
        extra = [self._tail.fd] if self._tail else []
        return [extent.fd for extent in self._replica.extents] + extra
