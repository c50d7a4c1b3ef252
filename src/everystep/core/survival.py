"""Does the shadow outlive its trainer here? Decided from facts, said in words."""

from __future__ import annotations

import re

import msgspec

_SPARED_MIN = -999  # one less, and a process is never killed
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
    memory_total_bytes: int = 0
    file_limit_bytes: int = -1  # of one file or shared memory; -1: unlimited
    address_limit_bytes: int = -1
    oom_group: str = ""  # the cgroup that is ended as a whole when memory runs out


class Survival(msgspec.Struct, frozen=True):
    outlives: bool
    because: str
    outlives_oom: bool = True


def survival(facts: Facts) -> Survival:
    """Whether a process in its own session survives the end of the trainer, and the OOM killer."""
    ends = _ends_with_it(facts)
    if ends:
        return Survival(False, ends, outlives_oom=False)
    where = " on this host" if facts.pid_namespace_is_initial else ", but not this container"
    lives = f"outlives the trainer{where}"
    if facts.oom_group:
        return Survival(
            True,
            f"{lives}; when memory runs out both are killed (memory.oom.group of {facts.oom_group})",
            outlives_oom=False,
        )
    return Survival(True, lives)


def _ends_with_it(facts: Facts) -> str:
    """What ends the shadow together with the trainer, if anything does."""
    if facts.pid == 1:
        return "the trainer is PID 1 of its namespace: its end kills everything in it"
    if not facts.pid_namespace_is_initial and facts.parent_pid <= 1:
        return "the trainer is the main process of its container, which ends with it"
    if facts.slurm_step and "step_" in facts.cgroup:
        return f"Slurm kills the cgroup of step {facts.slurm_step} when it ends"
    match = _UNIT_OR_STEP.search(facts.cgroup)
    return f"the cgroup of {match[1]} is killed as a whole when it ends" if match else ""


def spared(facts: Facts, held_bytes: int, inherited: int) -> int:
    """The oom_score_adj of a shadow. The kernel kills the process that uses most. Memory that holds the run's
    state, planned for at attach, should not count against the shadow; what it takes beyond that should."""
    total = facts.memory_limit_bytes or facts.memory_total_bytes
    share = -(-1000 * held_bytes // total) if total else 0
    return min(inherited, max(_SPARED_MIN, inherited - share))


def after_oom_score(verdict: Survival, wanted: int, reached: int) -> Survival:
    """Whether the shadow is spared may depend on what it was allowed to set."""
    if not verdict.outlives_oom or reached <= wanted:
        return verdict
    raised = min(1000, 2 * reached - wanted)
    return Survival(
        verdict.outlives,
        f"{verdict.because}; when memory runs out the larger of the two is killed: the shadow may not lower "
        f"its oom_score_adj from {reached} to {wanted} (grant CAP_SYS_RESOURCE, or start the trainer with "
        f"choom -n {raised})",
        outlives_oom=False,
    )
