"""Does the shadow outlive its trainer here? Decided from facts, said in words."""

from __future__ import annotations

import re

import msgspec

_UNIT_OR_STEP = re.compile(r"/(step_[^/]+|[^/]+\.service)(/|$)")


class Facts(msgspec.Struct, frozen=True):
    """What the machine says about itself; `host.py` in the lane reads them."""

    pid: int
    parent_pid: int
    pid_namespace_is_initial: bool
    cgroup: str
    slurm_step: str
    memory_available_bytes: int
    memory_limit_bytes: int  # 0: none
    memlock_bytes: int  # -1: unlimited
    shm_free_bytes: int
    shm_total_bytes: int


class Survival(msgspec.Struct, frozen=True):
    outlives: bool
    because: str


def survival(facts: Facts) -> Survival:
    """Whether a process in its own session survives the end of the trainer's container or job step."""
    if facts.pid == 1:
        return Survival(
            False, "the trainer is PID 1 of its namespace: its end kills everything in it"
        )
    if not facts.pid_namespace_is_initial and facts.parent_pid <= 1:
        return Survival(
            False, "the trainer is the main process of its container, which ends with it"
        )
    if facts.slurm_step and "step_" in facts.cgroup:
        return Survival(False, f"Slurm kills the cgroup of step {facts.slurm_step} when it ends")
    match = _UNIT_OR_STEP.search(facts.cgroup)
    if match:
        return Survival(False, f"the cgroup of {match[1]} is killed as a whole when it ends")
    if not facts.pid_namespace_is_initial:
        return Survival(True, "outlives the trainer, but not this container")
    return Survival(True, "outlives the trainer on this host")
