"""What a plan costs: wasted time per unit of useful time, term by term.

    waste = stall of bases / (f T) + stall of log writes / (b T)  +  wear                while all is well
          + (lost b T / 2  +  base load  +  replay (f / 2 + K) r  +  restart) / MTBF      when something fails

f steps lie between bases, b steps go into one write of the log, T is a step's time, K the steps until a base
is durable, r the time to replay a step. Without a log (b = 0), the steps behind the newest base are lost.
Wear is the least price of writing: without it, a disk that does not slow training down would never rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_WEAR_SHARE = 0.01  # of the time in which something is written: it counts for that much at least
_REPLAY_LOAD_MAX = 0.8  # of a step's time that replay may take: a replica with more falls behind


@dataclass(frozen=True)
class Machine:
    """What was measured, given or assumed. Seconds and bytes."""

    iteration_seconds: float
    base_bytes: float
    base_write_seconds: float  # of a whole base, its syncs included
    log_sync_seconds: float  # fixed cost of one write of the log
    log_bytes_per_step: float  # before compression
    write_bytes_per_second: float  # what the disk takes all the time
    replay_seconds_per_step: float
    base_load_seconds: float
    mtbf_seconds: float
    restart_seconds: float = 60.0
    base_slowdown: float = 1.0  # time that training lost, per second of writing a base
    log_slowdown: float = 1.0
    compression_ratio: float = 1.0  # stored bytes of a record over its dense bytes
    link_bytes_per_second: float = math.inf  # inf: bases come from the replica, not over the link
    replay_threads: int = 1  # that `replay_seconds_per_step` was measured with
    cores: int = 1

    def __post_init__(self) -> None:
        for name in ("iteration_seconds", "write_bytes_per_second", "mtbf_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"machine: {name} is {getattr(self, name)}, expected > 0")

    @property
    def record_bytes(self) -> float:
        return self.log_bytes_per_step * self.compression_ratio

    @property
    def base_stall_seconds(self) -> float:
        return self.base_slowdown * self.base_write_seconds

    @property
    def write_stall_seconds(self) -> float:
        """Of one write of the log, whatever it holds."""
        return self.log_slowdown * self.log_sync_seconds

    @property
    def record_stall_seconds(self) -> float:
        """Of the bytes of one record, whatever write they are part of."""
        return self.log_slowdown * self.record_bytes / self.write_bytes_per_second

    @property
    def base_wear_seconds(self) -> float:
        return max(0.0, _WEAR_SHARE - self.base_slowdown) * self.base_write_seconds

    @property
    def write_wear_seconds(self) -> float:
        return max(0.0, _WEAR_SHARE - self.log_slowdown) * self.log_sync_seconds

    @property
    def record_wear_seconds(self) -> float:
        seconds = self.record_bytes / self.write_bytes_per_second
        return max(0.0, _WEAR_SHARE - self.log_slowdown) * seconds

    @property
    def log_bytes_per_second(self) -> float:
        return self.record_bytes / self.iteration_seconds


@dataclass(frozen=True)
class Plan:
    base_every: int  # f: steps from one base to the next
    batch: int  # b: steps in one write of the log; 0: no log
    spread: int = 1  # K: steps until a base is durable
    threads: int = 1  # for replay


@dataclass(frozen=True)
class Waste:
    """Each term as a share of useful time."""

    bases: float
    log: float
    lost: float
    load: float
    replay: float
    restart: float
    wear: float

    @property
    def total(self) -> float:
        written = self.bases + self.log + self.wear
        return written + self.lost + self.load + self.replay + self.restart

    @property
    def overhead_percent(self) -> float:
        """How much slower training is while nothing fails."""
        return 100 * (self.bases + self.log)


def waste(machine: Machine, plan: Plan) -> Waste:
    step, failures = machine.iteration_seconds, 1 / machine.mtbf_seconds
    behind = plan.base_every / 2 + plan.spread  # steps between the newest base and now, on average
    if plan.batch:
        written = machine.write_stall_seconds / plan.batch + machine.record_stall_seconds
        wear = machine.write_wear_seconds / plan.batch + machine.record_wear_seconds
        lost, replayed = plan.batch / 2, behind
    else:
        written, wear, lost, replayed = 0.0, 0.0, behind, 0.0
    return Waste(
        bases=machine.base_stall_seconds / (plan.base_every * step),
        log=written / step,
        lost=failures * lost * step,
        load=failures * machine.base_load_seconds,
        replay=failures * replayed * machine.replay_seconds_per_step,
        restart=failures * machine.restart_seconds,
        wear=(machine.base_wear_seconds / plan.base_every + wear) / step,
    )


def best_base_every(machine: Machine, *, log: bool) -> float:
    """f*, where the derivative is zero: √(2 M C / (T r)); without a log a step is trained again instead."""
    again = machine.replay_seconds_per_step if log else machine.iteration_seconds
    if again <= 0:
        return math.inf
    cost = machine.base_stall_seconds + machine.base_wear_seconds
    return math.sqrt(2 * machine.mtbf_seconds * cost / (machine.iteration_seconds * again))


def best_batch(machine: Machine) -> float:
    """b*: √(2 M α) / T."""
    cost = machine.write_stall_seconds + machine.write_wear_seconds
    return math.sqrt(2 * machine.mtbf_seconds * cost) / machine.iteration_seconds


def spread_steps(machine: Machine, *, log: bool) -> int:
    """K: steps in which a base gets through the disk, and the link if it has to, beside the records."""
    records = machine.log_bytes_per_second
    disk = 1 - (records / machine.write_bytes_per_second if log else 0.0)
    link = machine.link_bytes_per_second - records
    if disk <= 0 or link <= 0:
        return 0
    seconds = max(machine.base_write_seconds / disk, machine.base_bytes / link)
    return max(1, math.ceil(seconds / machine.iteration_seconds))


def replay_threads(machine: Machine) -> int:
    """The fewest threads with which the replica keeps in step."""
    work = machine.replay_seconds_per_step * machine.replay_threads
    needed = math.ceil(work / (_REPLAY_LOAD_MAX * machine.iteration_seconds))
    return min(max(1, needed), max(1, machine.cores))


def objections(machine: Machine, plan: Plan, budget_percent: float) -> list[str]:
    """Why a plan cannot be taken; empty: it can."""
    found = []
    log = plan.batch > 0
    if plan.base_every < max(1, plan.batch, plan.spread):
        found.append(
            f"a base every {plan.base_every} steps: one takes {plan.spread} steps, "
            f"and a write of the log holds {plan.batch}"
        )
    if spread_steps(machine, log=log) == 0:
        found.append("records leave no room for a base on the disk or the link")
    per_step = machine.base_bytes / plan.base_every + (machine.record_bytes if log else 0.0)
    rate = per_step / machine.iteration_seconds
    if rate > machine.write_bytes_per_second:
        found.append(
            f"{rate / 1e6:.0f} MB/s, the disk takes {machine.write_bytes_per_second / 1e6:.0f}"
        )
    overhead = waste(machine, plan).overhead_percent
    if overhead > budget_percent * (1 + 1e-9):
        found.append(f"slows training by {overhead:.2f} %, {budget_percent:g} % are allowed")
    return found
