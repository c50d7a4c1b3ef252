"""What finding hands to loading: a whole state at one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from everystep.core.census import Census
from everystep.core.tensors import Held
from everystep.format.base import Point, SessionValues
from everystep.lane.arena import SharedMemory
from everystep.lane.control import ReplicaHandle
from everystep.store.log_reader import LogReader


class RestorePoint(NamedTuple):
    """Ready to be loaded."""

    point: Point
    source: str  # shadow | store
    census: Census
    session: SessionValues
    tensors: Callable[[], Iterator[Held]]
    tail: memoryview
    tail_steps: int
    problems: list[str]
    log: LogReader | tuple[()] = ()  # records behind the state, still to be replayed
    handle: ReplicaHandle | None = None
    memory: tuple[SharedMemory, ...] = ()
    finished: int | None = None  # the newest step that training had finished, if a shadow knows

    @property
    def line(self) -> Point | None:
        """What whoever goes on from here continues."""
        return self.point if self.handle is None else self.handle.line

    @property
    def lost_steps(self) -> int | None:
        return None if self.finished is None else max(0, self.finished - self.point.step)

    def group_values(self, optimizer: int) -> bytes:
        """What the seal says of an optimizer; empty where it says nothing."""
        groups = self.session.groups
        return groups[optimizer] if optimizer < len(groups) else b""

    def close(self) -> None:
        """Give up a shadow's memory; whoever it was handed on to keeps it."""
        for memory in self.memory:
            memory.close()


def resumed_line(run: str, found: RestorePoint) -> str:
    """What a person wants to know when training goes on."""
    census, lost = found.census, found.lost_steps
    how = "exact" if census.exactness == "exact" else f"{census.exactness}: {census.why}"
    line = f"resumed {run} at step {found.point.step} from the {found.source} ({how})"
    return line if lost is None else f"{line}; {lost} step{'' if lost == 1 else 's'} lost"
