"""The tuner's model, its closed forms and its choice, against brute force and a simulated run."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everystep.tune.choose import choose, worth_changing
from everystep.tune.model import (
    Machine,
    Plan,
    best_base_every,
    best_batch,
    objections,
    spread_steps,
    waste,
)
from everystep.tune.simulate import simulate


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


machines = st.builds(
    Machine,
    iteration_seconds=magnitudes(0.01, 5),
    base_bytes=magnitudes(1e7, 1e11),
    base_write_seconds=magnitudes(0.05, 100),
    log_sync_seconds=magnitudes(1e-4, 0.1),
    log_bytes_per_step=magnitudes(1e4, 1e9),
    write_bytes_per_second=magnitudes(1e8, 1e10),
    replay_seconds_per_step=magnitudes(1e-3, 1),
    base_load_seconds=magnitudes(0.1, 100),
    mtbf_seconds=magnitudes(600, 1e6),
    base_slowdown=st.floats(0.01, 1),
    log_slowdown=st.floats(0.01, 1),
)


def random_machine(chance: random.Random) -> Machine:
    """Of a size that occurs: the same optimizer state may go to a slow disk or a fast one."""

    def between(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    step, rate, base = between(0.05, 3), between(3e8, 8e9), between(1e8, 5e10)
    return Machine(
        iteration_seconds=step,
        base_bytes=base,
        base_write_seconds=base / rate,
        log_sync_seconds=between(5e-4, 5e-2),
        log_bytes_per_step=base / 3,
        compression_ratio=chance.choice([1.0, 0.02, 0.005, 0.001]),
        write_bytes_per_second=rate,
        replay_seconds_per_step=step * between(0.01, 0.5),
        base_load_seconds=base / rate,
        mtbf_seconds=between(1800, 2e5),
        restart_seconds=between(5, 120),
        base_slowdown=between(0.01, 0.5),
        log_slowdown=between(0.01, 0.5),
    )


def relaxed(machine: Machine) -> Machine:
    """Nothing but the derivative decides: the disk is endless, a base is durable at once."""
    return dataclasses.replace(
        machine, write_bytes_per_second=1e18, base_bytes=0, log_bytes_per_step=0
    )


@given(machines)
def test_closed_forms_are_the_best_of_a_grid(machine: Machine) -> None:
    machine = relaxed(machine)
    f, b = best_base_every(machine, log=True), best_batch(machine)
    grid = [math.exp(x / 20) for x in range(-60, 61)]
    for closed, of in (
        (f, lambda x: Plan(x, 1)),
        (b, lambda x: Plan(1, x)),
    ):
        best = waste(machine, of(closed)).total
        assert all(waste(machine, of(closed * x)).total >= best * (1 - 1e-12) for x in grid)
    alone = best_base_every(machine, log=False)
    best = waste(machine, Plan(alone, 0)).total
    assert all(waste(machine, Plan(alone * x, 0)).total >= best * (1 - 1e-12) for x in grid)


@given(machines, st.floats(0.05, 5))
def test_the_choice_is_the_best_of_a_full_grid(machine: Machine, budget: float) -> None:
    """By the model's own measure, with every constraint; and it keeps them all."""
    found = choose(machine, budget)
    assert objections(machine, found.plan, budget) == []
    assert found.waste.overhead_percent <= budget * (1 + 1e-6)
    for b in (0, *(round(1.6**i) for i in range(20))):
        spread = spread_steps(machine, log=b > 0)
        for f in (round(1.6**i) for i in range(30)):
            plan = Plan(f, b, spread)
            if not objections(machine, plan, budget):
                assert found.waste.total <= waste(machine, plan).total * 1.001, plan


@pytest.mark.parametrize("number", range(8))
def test_the_model_predicts_what_the_simulation_shows(number: int) -> None:
    """Where failures are rare against what one costs: the model is of first order."""
    machine = dataclasses.replace(random_machine(random.Random(number)), mtbf_seconds=3e4)
    plan = choose(machine, 2.0).plan
    steps = int(100 * machine.mtbf_seconds / machine.iteration_seconds)
    simulated = simulate(machine, [plan], steps=steps, runs=50).mean()
    assert simulated == pytest.approx(waste(machine, plan).total, rel=0.1)


def test_the_choice_is_near_the_best_of_a_grid_of_simulated_runs() -> None:
    """Over 50 machines and failure rates; every plan of a machine meets the same failures."""
    worse = []
    for number in range(50):
        machine = random_machine(random.Random(1000 + number))
        budget = random.Random(number).choice([0.5, 2.0, 10.0])
        grid = [
            Plan(round(1.5**i), b, spread_steps(machine, log=b > 0))
            for b in (0, *sorted({round(1.7**j) for j in range(16)}))
            for i in range(4, 34)
        ]
        plans = [plan for plan in grid if not objections(machine, plan, budget)]
        steps = int(50 * machine.mtbf_seconds / machine.iteration_seconds)
        first = simulate(machine, plans, steps=steps, runs=1, seed=number).mean(axis=1)
        # the luckiest of many is not the best: the best few meet other failures, and more of them
        few = [choose(machine, budget).plan, *(plans[i] for i in first.argsort()[:10])]
        again = simulate(machine, few, steps=steps, runs=30, seed=number + 1000).mean(axis=1)
        worse.append(again[0] / again[1:].min())
    print(f"at worst {max(worse):.4f} times the best")
    assert max(worse) <= 1.05, sorted(worse)[-5:]


MACHINE = Machine(
    iteration_seconds=0.2,
    base_bytes=4e9,
    base_write_seconds=4.0,
    log_sync_seconds=0.005,
    log_bytes_per_step=1e6,
    write_bytes_per_second=1e9,
    replay_seconds_per_step=0.02,
    base_load_seconds=4.0,
    mtbf_seconds=6 * 3600,
    base_slowdown=0.1,
    log_slowdown=0.1,
    replay_threads=4,
    cores=16,
)


def test_a_log_that_the_disk_cannot_take_is_not_chosen_and_said_so() -> None:
    heavy = dataclasses.replace(MACHINE, log_bytes_per_step=1.4e9)
    found = choose(heavy, 0.5)
    assert found.plan.batch == 0 and any("no log" in why for why in found.why)
    assert choose(MACHINE, 0.5).plan.batch >= 1


def test_what_the_user_fixed_stays() -> None:
    assert choose(MACHINE, 0.5, base_every=777).plan.base_every == 777
    assert choose(MACHINE, 0.5, batch=3).plan.batch == 3
    assert choose(MACHINE, 0.5, batch=0).plan.batch == 0


def test_a_disk_rests_although_it_does_not_slow_training_down() -> None:
    """The plan tells the slowdown as measured, and is chosen as if there were a little of it."""
    little = dataclasses.replace(MACHINE, base_slowdown=0.01, log_slowdown=0.01)
    nothing = dataclasses.replace(MACHINE, base_slowdown=0.0, log_slowdown=0.0)
    for machine in (little, nothing):
        for batch in (None, 0):
            found, expected = choose(machine, 0.5, batch=batch), choose(little, 0.5, batch=batch)
            assert found.plan == expected.plan
            assert found.waste.total == pytest.approx(expected.waste.total)
    assert choose(nothing, 0.5).waste.overhead_percent == 0 < choose(nothing, 0.5).waste.wear
    assert choose(little, 0.5).waste.overhead_percent > choose(little, 0.5).waste.wear == 0


def test_a_small_budget_makes_bases_rarer_and_the_reason_says_so() -> None:
    heavy = dataclasses.replace(MACHINE, base_slowdown=1.0, mtbf_seconds=600)
    tight, loose = choose(heavy, 0.5), choose(heavy, 50)
    assert tight.plan.base_every > loose.plan.base_every
    assert any("would waste least" in why for why in tight.why)
    others = [o for o in tight.others if o.what == "bases twice as often"]
    assert others and others[0].objections and others[0].waste.total < tight.waste.total


@given(machines, st.floats(0.1, 5))
def test_other_choices_are_sorted_and_no_open_one_is_better(
    machine: Machine, budget: float
) -> None:
    found = choose(machine, budget)
    open_ones = [o.waste.total for o in found.others if not o.objections]
    assert open_ones == sorted(open_ones)
    assert all(total >= found.waste.total * 0.999 for total in open_ones)


def test_a_plan_is_left_only_for_a_saving_and_not_often() -> None:
    best = choose(MACHINE, 0.5).plan
    near = dataclasses.replace(best, base_every=round(best.base_every * 1.05))
    far = dataclasses.replace(best, base_every=best.base_every * 40)
    late = {"seconds": 1e6, "steps": 10**6, "changes": 50}
    assert not worth_changing(MACHINE, 0.5, near, best, **late)
    assert not worth_changing(MACHINE, 0.5, best, best, **late)
    assert worth_changing(MACHINE, 0.5, far, best, **late)
    assert not worth_changing(MACHINE, 0.5, far, best, seconds=1.0, steps=10**6, changes=0)
    assert not worth_changing(MACHINE, 0.5, far, best, seconds=1e6, steps=1, changes=0)
    changed = [
        worth_changing(MACHINE, 0.5, far, best, seconds=60, steps=999, changes=n) for n in (0, 9)
    ]
    assert changed == [True, False], "changes keep their distance"
    broken = dataclasses.replace(best, base_every=best.spread)
    assert objections(MACHINE, broken, 0.5)
    assert worth_changing(MACHINE, 0.5, broken, best, seconds=0.0, steps=0, changes=9), "at once"


def test_slower_replay_takes_more_threads() -> None:
    slow = dataclasses.replace(MACHINE, replay_seconds_per_step=0.5)
    assert choose(slow, 0.5).plan.threads > choose(MACHINE, 0.5).plan.threads >= 1
    hopeless = dataclasses.replace(MACHINE, replay_seconds_per_step=50.0)
    assert choose(hopeless, 0.5).plan.threads == hopeless.cores
