"""The choice: closed forms, clamped to what budget and disk allow, refined around them, with reasons."""

from __future__ import annotations

import math
from dataclasses import dataclass

from everystep.tune.model import (
    Machine,
    Plan,
    Waste,
    best_base_every,
    best_batch,
    objections,
    replay_threads,
    spread_steps,
    waste,
)

_BATCH_MAX = 1 << 20
_EVERY_MAX = 1 << 40
_LADDER = 1.05  # from one batch that is tried to the next
_SAVING = 0.1  # of the waste that depends on the plan: less is not worth a change
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 10.0, 600.0
_PAUSE_STEPS = 100


@dataclass(frozen=True)
class Alternative:
    plan: Plan
    waste: Waste
    what: str
    objections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    plan: Plan
    waste: Waste
    why: tuple[str, ...]
    others: tuple[Alternative, ...]  # those that can be taken first, the cheapest first


def choose(
    machine: Machine,
    budget_percent: float,
    *,
    base_every: int | None = None,
    batch: int | None = None,
) -> Choice:
    """The cheapest plan within the budget; what the user fixed stays as it is."""
    batches = _batches(machine) if batch is None else [batch]
    plans = [_with_batch(machine, budget_percent, b, base_every) for b in batches]
    costs = [(bool(objections(machine, p, budget_percent)), waste(machine, p).total) for p in plans]
    best = plans[min(range(len(plans)), key=costs.__getitem__)]
    return Choice(
        best,
        waste(machine, best),
        tuple(_reasons(machine, budget_percent, best, base_every, batch)),
        tuple(_others(machine, budget_percent, best, base_every, batch)),
    )


def worth_changing(
    machine: Machine,
    budget_percent: float,
    old: Plan,
    new: Plan,
    *,
    seconds: float,
    steps: int,
    changes: int,
) -> bool:
    """Whether to leave a plan that has been in force for so long. One that breaks the budget or does not fit
    the disk is left at once; else a change must save something, and it comes the later the more there were:
    what was measured at first is not worth much."""
    if new == old:
        return False
    if objections(machine, old, budget_percent):
        return not objections(machine, new, budget_percent)
    pause = min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS_MIN * 2.0 ** min(changes, 30))
    if seconds < pause or steps < _PAUSE_STEPS:
        return False
    now, then = waste(machine, old), waste(machine, new)
    return now.total - then.total > _SAVING * (now.total - now.load - now.restart)


def _batches(machine: Machine) -> list[int]:
    """0 (bases only), and a ladder of sizes with the closed form on it."""
    top = max(1.0, min(best_batch(machine), _BATCH_MAX))
    rungs = math.ceil(math.log(_BATCH_MAX) / math.log(_LADDER))
    ladder = {min(_BATCH_MAX, round(_LADDER**i)) for i in range(rungs + 1)}
    return sorted({0, math.floor(top), math.ceil(top)} | ladder)


def _with_batch(
    machine: Machine, budget_percent: float, batch: int, base_every: int | None
) -> Plan:
    """The best f for this b: its closed form, or as often as the constraints allow."""
    log = batch > 0
    spread = spread_steps(machine, log=log)
    if base_every is None:
        lowest = max(1, batch, spread, _affordable(machine, budget_percent, batch))
        wished = best_base_every(machine, log=log)
        below = math.floor(min(wished, _EVERY_MAX))
        plans = [
            Plan(min(max(f, lowest), _EVERY_MAX), batch, spread, replay_threads(machine))
            for f in (below, below + 1)
        ]
        return min(plans, key=lambda plan: waste(machine, plan).total)
    return Plan(base_every, batch, spread, replay_threads(machine))


def _affordable(machine: Machine, budget_percent: float, batch: int) -> int:
    """The shortest interval of bases that leaves budget and disk room for the log."""
    step, stall = machine.iteration_seconds, machine.base_stall_seconds
    written = 0.0
    if batch:
        written = machine.write_stall_seconds / batch + machine.record_stall_seconds
    left = budget_percent / 100 - written / step
    records = machine.record_bytes if batch else 0.0
    room = machine.write_bytes_per_second * step - records  # bytes a step
    if (stall > 0 and left <= 0) or room <= 0:
        return _EVERY_MAX
    by_budget = stall / (step * left) if stall > 0 else 1.0
    return min(_EVERY_MAX, math.ceil(max(by_budget, machine.base_bytes / room, 1.0)))


def _others(
    machine: Machine, budget: float, best: Plan, base_every: int | None, batch: int | None
) -> list[Alternative]:
    """What lies around the choice, and the two ends: a write at every step, and no log at all."""
    tried: dict[Plan, str] = {}
    if base_every is None:
        for factor, word in ((0.5, "bases twice as often"), (2, "bases half as often")):
            f = max(1, round(best.base_every * factor))
            tried[Plan(f, best.batch, best.spread, best.threads)] = word
    if batch is None:
        if best.batch:
            for factor, word in ((0.5, "smaller writes of the log"), (2, "larger ones")):
                b = max(1, round(best.batch * factor))
                tried.setdefault(_with_batch(machine, budget, b, base_every), word)
            tried.setdefault(_with_batch(machine, budget, 0, base_every), "no log, only bases")
        tried.setdefault(_with_batch(machine, budget, 1, base_every), "every step durable at once")
    tried.pop(best, None)
    found = [
        Alternative(plan, waste(machine, plan), what, tuple(objections(machine, plan, budget)))
        for plan, what in tried.items()
    ]
    return sorted(found, key=lambda other: (bool(other.objections), other.waste.total))


def _reasons(
    machine: Machine, budget: float, plan: Plan, base_every: int | None, batch: int | None
) -> list[str]:
    step, log = machine.iteration_seconds, plan.batch > 0
    said = []
    wished = best_base_every(machine, log=log)
    if base_every is not None:
        said.append(f"a base every {plan.base_every} steps: as given")
    elif plan.base_every > wished + 1:
        said.append(
            f"a base every {plan.base_every} steps: {wished:.0f} would waste least, "
            "but budget, disk or the time a base takes allow no more of them"
        )
    else:
        said.append(
            f"a base every {plan.base_every} steps ({plan.base_every * step:.0f} s): its stall and "
            f"{'replaying' if log else 'training again'} what lies behind it balance here"
        )
    if batch is not None:
        said.append(f"{plan.batch} steps a write of the log: as given")
    elif not log:
        full = Plan(_EVERY_MAX, _BATCH_MAX, spread_steps(machine, log=True), plan.threads)
        blocked = objections(machine, full, budget)
        why = blocked[0] if blocked else "records cost more than they save"
        said.append(f"no log: {why}")
    else:
        said.append(
            f"{plan.batch} steps a write of the log: a lost host costs {plan.batch * step / 2:.2g} s "
            f"on average, a write {machine.log_sync_seconds * 1e3:.2g} ms"
        )
    problems = objections(machine, plan, budget)
    return said + [f"nothing better is possible: {problem}" for problem in problems]
