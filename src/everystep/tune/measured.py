"""From what a shadow measures to the machine that the model speaks of."""

from __future__ import annotations

from dataclasses import dataclass

from everystep.tune.model import Machine

_WRITES_ENOUGH = 8  # from here on writes of the log say more than a probe of the disk
_SYNC_SECONDS_MIN = 1e-5


@dataclass(frozen=True)
class Measured:
    """Part of a shadow's status. Zero: not known yet."""

    iteration_seconds: float = 0.0
    base_bytes: int = 0
    base_write_seconds: float = 0.0
    base_slowdown: float = 1.0
    record_bytes: float = 0.0
    log_writes: int = 0
    log_write_seconds: float = 0.0  # of one
    log_write_bytes: float = 0.0
    log_slowdown: float = 1.0
    replay_seconds_per_step: float = 0.0
    replay_threads: int = 1
    cores: int = 1

    @property
    def enough(self) -> bool:
        return min(self.iteration_seconds, self.base_write_seconds, self.record_bytes) > 0


def machine_of(
    measured: Measured,
    *,
    sync_seconds: float,
    write_bytes_per_second: float,
    mtbf_seconds: float,
    restart_seconds: float,
) -> Machine:
    """Recovery reads as fast as the disk writes. A run that cannot replay trains its steps again."""
    rate = write_bytes_per_second
    if measured.log_writes >= _WRITES_ENOUGH:
        sync_seconds = measured.log_write_seconds - measured.log_write_bytes / rate
    replay = measured.replay_seconds_per_step or measured.iteration_seconds
    return Machine(
        iteration_seconds=measured.iteration_seconds,
        base_bytes=measured.base_bytes,
        base_write_seconds=measured.base_write_seconds,
        log_sync_seconds=max(sync_seconds, _SYNC_SECONDS_MIN),
        log_bytes_per_step=measured.record_bytes,
        write_bytes_per_second=rate,
        replay_seconds_per_step=replay + measured.record_bytes / rate,
        base_load_seconds=measured.base_bytes / rate,
        mtbf_seconds=mtbf_seconds,
        restart_seconds=restart_seconds,
        base_slowdown=measured.base_slowdown,
        log_slowdown=measured.log_slowdown,
        replay_threads=measured.replay_threads,
        cores=measured.cores,
    )
