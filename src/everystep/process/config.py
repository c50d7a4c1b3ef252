"""What a trainer tells the shadow it starts. Travels through stdin; memory comes as descriptors."""

from __future__ import annotations

import msgspec

from everystep.core.census import Census
from everystep.core.geometry import Geometry
from everystep.core.survival import Survival
from everystep.errors import ProtocolMismatch
from everystep.format.base import Point
from everystep.lane.control import ReplicaHandle
from everystep.lane.protocol import NOT_UNDERSTOOD, PROTOCOL, head_of
from everystep.lane.runtime import ShadowCard
from everystep.options import Options
from everystep.store.runs import Known


class ShadowConfig(msgspec.Struct, frozen=True):
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
    run_id: str  # of the run that the directory held at attach; empty: none yet
    continues: Point | None
    known: Known  # how far attach has seen the run
    powers: dict[float, bytes]  # of betas, as the trainer's device computes them; float32 each
    replay_threads: int
    adopted: ReplicaHandle | None  # the replica taken over from the shadow before, if any
    predecessor: ShadowCard | None  # the shadow that speaks for the run until this one can
    survival: Survival
    options: Options  # of attach, all of them
    protocol: int = PROTOCOL

    @property
    def log_is_resumed(self) -> bool:
        """Otherwise a resume takes bases alone, which hold what the log lacks."""
        return self.options.tuning.residuals == "lossy" or not any(
            a.lossy for a in self.census.atoms
        )


def read_config(message: bytes) -> ShadowConfig:
    """A trainer keeps the code it has loaded, its next shadow gets what is installed by then."""
    theirs = head_of(message).protocol
    try:
        if theirs == PROTOCOL:
            return msgspec.msgpack.decode(message, type=ShadowConfig)
        found = f"the trainer speaks protocol {theirs}, the shadow's everystep {PROTOCOL}"
    except NOT_UNDERSTOOD as error:
        found = f"what the trainer says is not understood ({error})"
    raise ProtocolMismatch(
        f"open shadow: {found}: everystep was changed while the trainer runs",
        hint="restart the trainer, or install again what it began with",
    )
