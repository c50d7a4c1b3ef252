"""A trainer's connection to its shadow: the ring, the process that reads it, and how it ends."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everystep.core.census import Census
from everystep.core.geometry import Geometry, replica_bytes, ring_geometry
from everystep.core.survival import Facts, survival
from everystep.errors import LaneTimeout, NotEnoughMemory, ShadowLost
from everystep.lane.arena import SharedMemory
from everystep.lane.host import process_start, process_state, read_facts
from everystep.lane.ring import RingWriter
from everystep.lane.runtime import ShadowCard
from everystep.options import Options
from everystep.process.spawn import ShadowHandle, start_shadow
from everystep.recover.point import RestorePoint
from everystep.standing import Place

log = logging.getLogger("everystep")

WAIT_SECONDS = 600.0
START_SECONDS = 60.0  # a shadow says within half of it that it has started, unless it is stuck
_SILENT_SECONDS = 5.0


class LongWait:
    """Says once of each wait for a shadow that it takes longer than anybody expects."""

    def __init__(self, shadow: ShadowHandle) -> None:
        self._shadow = shadow
        self._is_told = False

    def look(self, waited: float, limit: float, why: str, then: str) -> None:
        """`then`: what it is waited for, and what comes after `limit` seconds."""
        if waited < _SILENT_SECONDS:
            self._is_told = False
        elif not self._is_told:
            self._is_told = True
            pid = self._shadow.pid
            until = time.strftime("%H:%M:%S", time.localtime(time.time() + limit - waited))
            stopped = process_state(pid) == "T"
            log.warning(
                "everystep: %s: training waits until %s for shadow %d to %s%s",
                why,
                until,
                pid,
                then,
                f"; it is stopped: kill -CONT {pid} wakes it" if stopped else "",
            )


@dataclass
class Connection:
    ring: RingWriter
    shadow: ShadowHandle
    predecessor: ShadowCard | None

    def __post_init__(self) -> None:
        self._long = LongWait(self.shadow)

    def pause(self, deadline: float, what: str) -> None:
        """A moment of waiting for the shadow; raises where there is nothing to wait for any more."""
        if not self.shadow.alive:
            raise ShadowLost(f"{what}: shadow {self.shadow.pid} died meanwhile")
        if time.monotonic() > deadline:
            raise LaneTimeout(
                f"{what}: shadow {self.shadow.pid} has not taken it in {WAIT_SECONDS:g} s",
                hint="everystep status tells what it holds",
            )
        waited = WAIT_SECONDS - (deadline - time.monotonic())
        self._long.look(waited, WAIT_SECONDS, what, "take it, then an error is raised")
        time.sleep(0.01)

    def close(self) -> None:
        """Give the memory up; the shadow keeps its own hold on it."""
        self.shadow.close()
        self.ring.memory.close()


def waiting_rule(
    connection: Connection, on_lag: str, run: Path, step: Callable[[], int]
) -> Callable[[float, bool], bool]:
    """May the tap wait for a slot? While the shadow starts, if the user prefers to lose nothing, or where
    nothing else helps (`must`)."""
    long = LongWait(connection.shadow)

    def may_wait(waited_seconds: float, must: bool) -> bool:
        limit = WAIT_SECONDS if must or on_lag == "wait" else START_SECONDS
        if waited_seconds > limit or not connection.shadow.alive:
            return False
        if limit == START_SECONDS and connection.ring.shadow_is_warm:
            return False
        why = f"run {run}, step {step()}: the ring is full"
        long.look(waited_seconds, limit, why, "read it, then records are dropped")
        return True

    return may_wait


def plan_memory(
    census: Census, document_bytes: int, options: Options, adopts: bool, unmoved_bytes: int
) -> Geometry:
    """Ring geometry for what this host can give; refuses clearly where it is too little."""
    facts = read_facts()
    available = _available(facts, options)
    replica = 0 if adopts else replica_bytes(census)
    if replica > available:
        raise NotEnoughMemory(
            f"attach: the replica needs {replica / 2**20:.0f} MiB of host memory, "
            f"{available / 2**20:.0f} MiB are available"
            + (
                f" (cgroup limit {facts.memory_limit_bytes / 2**20:.0f} MiB)"
                if facts.memory_limit_bytes
                else ""
            ),
            hint="free host memory, raise the cgroup's limit, or point tuning=Tuning(arena_dir=…) at a disk",
        )
    return ring_geometry(census, document_bytes, available - replica, unmoved_bytes)


def _available(facts: Facts, options: Options) -> int:
    if options.tuning.arena_dir is None:
        return facts.memory_available_bytes
    try:
        return shutil.disk_usage(options.tuning.arena_dir).free
    except OSError as error:
        raise NotEnoughMemory(
            f"tuning.arena_dir {options.tuning.arena_dir}: {error.strerror}",
            hint="give an existing directory",
        ) from error


def connect(
    run: Path,
    folder: Path,
    census: Census,
    powers: dict[float, bytes],
    options: Options,
    *,
    replay_threads: int,
    document_bytes: int,
    unmoved_bytes: int,
    place: Place,
    found: RestorePoint | None,
    predecessor: ShadowCard | None,
) -> Connection:
    """Make a ring and start a shadow that reads it. `found` from a shadow's memory is handed on."""
    facts = read_facts()
    verdict = survival(facts)
    adopted = found.handle if found else None
    geometry = plan_memory(census, document_bytes, options, adopted is not None, unmoved_bytes)
    memory = SharedMemory.create(geometry.bytes, "ring", options.tuning.arena_dir)
    ring = RingWriter(memory, geometry, secrets.randbits(64))
    extents = found.memory[: adopted.extents] if found and adopted else ()
    tail = found.memory[-1].fd if found and adopted and adopted.tail_bytes else -1
    try:
        shadow = start_shadow(
            run=str(run),
            folder=str(folder),
            name=secrets.token_hex(4),
            trainer_pid=os.getpid(),
            trainer_start=process_start(os.getpid()),
            ring_fd=memory.fd,
            extent_fds=tuple(extent.fd for extent in extents),
            tail_fd=tail,
            geometry=geometry,
            census=census,
            powers=powers,
            replay_threads=replay_threads,
            **place._asdict(),
            adopted=adopted,
            predecessor=predecessor,
            survival=verdict,
            options=options,
        )
    except BaseException:
        memory.close()
        raise
    log.log(
        logging.INFO if verdict.outlives else logging.WARNING,
        "attached run=%s step=%d shadow=%d ring_bytes=%d replica_bytes=%d available_bytes=%d: %s",
        run,
        place.step,
        shadow.pid,
        geometry.bytes,
        replica_bytes(census),
        facts.memory_available_bytes,
        verdict.because,
    )
    return Connection(ring, shadow, predecessor)
