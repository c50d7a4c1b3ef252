"""What a trainer tells the shadow it starts. Travels through stdin; memory comes as descriptors."""

from __future__ import annotations

import msgspec

from everystep.core.census import Census
from everystep.core.geometry import Geometry
from everystep.core.retention import Rules
from everystep.core.survival import Survival
from everystep.format.base import Point
from everystep.lane.control import Holding
from everystep.lane.runtime import ShadowCard


class Opening(msgspec.Struct, frozen=True):
    run: str
    folder: str  # the run's meeting place on this host
    name: str  # of this shadow; its sockets carry it
    trainer_pid: int
    trainer_start: int
    ready_fd: int
    ring_fd: int
    extent_fds: tuple[int, ...]
    tail_fd: int  # -1: none
    geometry: Geometry
    census: Census
    step: int
    continues: Point | None
    powers: dict[float, bytes]  # of betas, as the trainer's device computes them; float32 each
    replay_threads: int
    adopted: Holding | None  # the replica taken over from the shadow before, if any
    predecessor: ShadowCard | None  # the shadow that speaks for the run until this one can
    survival: Survival
    durable_every: str | int
    durable_log: int | str
    overhead_budget_percent: float
    mtbf: str | None
    rules: Rules
    idle_exit: str
    arena_dir: str | None
    bucket: str | None = None
    bucket_bytes_per_second: int = 0
