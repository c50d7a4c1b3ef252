"""Memory that goes from shadow to shadow: taken over when this one starts, handed on when it yields."""

from __future__ import annotations

from everystep.format.base import Point
from everystep.lane.arena import SharedMemory
from everystep.lane.control import ReplicaHandle
from everystep.process.config import ShadowConfig
from everystep.shadow.intake import Intake
from everystep.shadow.replica import Replica


class Handover:
    def __init__(self, config: ShadowConfig, replica: Replica, intake: Intake) -> None:
        self._config, self._replica, self._intake = config, replica, intake
        self._tail: SharedMemory | None = None
        self._take_over()

    def _take_over(self) -> None:
        config, handle = self._config, self._config.adopted
        if handle is None:
            self._replica.reserve_values()
            return
        self._replica.adopt(handle, [SharedMemory(fd) for fd in config.extent_fds])
        self._intake.state.session = handle.session
        if config.tail_fd >= 0:
            tail = SharedMemory(config.tail_fd)
            data = bytes(tail.view[: handle.tail_bytes])
            self._intake.state.tail.adopt(handle.tail_steps, data)
            tail.close()

    def handle(self, term: int) -> ReplicaHandle:
        """Where the replica lies. `term`: ours, if we own one. Else its state goes on from the point that we
        continue. Newer steps of that point's term may be ones that training was rewound from."""
        state = self._intake.state
        tail = state.tail.data
        if tail:
            self._tail = SharedMemory.create(
                len(tail), "tail", self._config.options.tuning.arena_dir
            )
            self._tail.view[: len(tail)] = tail
        session = state.session_values()
        return self._replica.handle(
            line=Point(term, session.step) if term else self._config.continues,
            session=session,
            tail_bytes=len(tail),
            tail_steps=state.tail.steps,
        )

    def descriptors(self) -> list[int]:
        extra = [self._tail.fd] if self._tail else []
        return [extent.fd for extent in self._replica.extents] + extra
