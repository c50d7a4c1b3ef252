"""The greedy schedule: what it promises, and how near it comes to the exact optimum."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from everystep.core.pace import FIRST_SLICE_BYTES, next_slice_bytes, steps_left
from everystep.core.release import release_plan
from everystep.core.schedule import Schedule, Stretch, cut, plan_offload

INSTANCES = int(os.environ.get("EVERYSTEP_INSTANCES", "20"))  # 200 for the full run
SIZES = st.lists(st.integers(1, 400), min_size=1, max_size=20)
PHASES = st.lists(
    st.builds(Stretch, st.integers(0, 1500), st.integers(0, 1500)), min_size=2, max_size=6
)


@settings(max_examples=300)
@given(sizes=SIZES, stretches=PHASES, data=st.data())
def test_no_stretch_is_overloaded(
    sizes: list[int], stretches: list[Stretch], data: st.DataObject
) -> None:
    update = data.draw(st.integers(1, len(stretches) - 1))
    plan = plan_offload(sizes, stretches, update)
    assert sorted([*plan.live, *plan.snapshot, *plan.late]) == list(range(len(sizes)))
    for number, stretch in enumerate(stretches):
        here = sum(size for size, at in zip(sizes, plan.stretch_of, strict=True) if at == number)
        assert here <= stretch.link_bytes
        if number >= update:  # snapshots lie in memory from the update until they are offloaded
            kept = sum(
                size
                for size, at in zip(sizes, plan.stretch_of, strict=True)
                if number <= at < len(stretches)
            )
            assert kept <= stretch.free_bytes
    if plan.late:  # a piece is late only if nothing takes it
        smallest = min(sizes[i] for i in plan.late)
        spent = [
            sum(s for s, at in zip(sizes, plan.stretch_of, strict=True) if at == n)
            for n in range(update)
        ]
        assert all(
            p.link_bytes - used < smallest for p, used in zip(stretches, spent, strict=False)
        )


def least_seconds(sizes: list[int], stretches: list[Stretch], update: int) -> float:
    """The integer programme: a binary for each piece and stretch, the last stretch meaning "late".

    In units of link bytes, waiting included. The solver's bound is taken: where its time is up it is
    below the optimum, never above.
    """
    pieces, slots = len(sizes), len(stretches) + 1
    cost = np.zeros((pieces, slots))
    cost[:, -1] = sizes
    rows, upper = [], []
    for number, stretch in enumerate(stretches):
        row = np.zeros((pieces, slots))
        row[:, number] = sizes
        rows.append([*row.ravel(), 0])
        upper.append(stretch.link_bytes)
        if number >= update:
            row = np.zeros((pieces, slots))
            row[:, number : len(stretches)] = np.array(sizes)[:, None]
            rows.append([*row.ravel(), 0])
            upper.append(stretch.free_bytes)
    once = np.hstack([np.kron(np.eye(pieces), np.ones(slots)), np.zeros((pieces, 1))])
    unavoidable = sum(stretch.link_bytes for stretch in stretches)
    answer = milp(
        [*cost.ravel(), unavoidable],
        integrality=np.ones(pieces * slots + 1),
        bounds=Bounds([0] * (pieces * slots) + [1], 1),
        constraints=[
            LinearConstraint(np.array(rows), -np.inf, np.array(upper)),
            LinearConstraint(once, 1, 1),
        ],
        options={"time_limit": 5, "mip_rel_gap": 0.001},
    )
    return float(answer.mip_dual_bound)


def random_instance(chance: np.random.Generator) -> tuple[list[int], list[Stretch], int]:
    """State of about the size of what an iteration can take: where choosing well matters."""
    forward, backward = int(chance.integers(1, 3)), int(chance.integers(1, 4))
    stretches = [
        Stretch(int(chance.integers(50, 400)), int(chance.integers(0, 300)))
        for _ in range(forward + backward + 2)
    ]
    tensors, wanted = (
        [],
        chance.uniform(0.5, 1.3) * sum(stretch.link_bytes for stretch in stretches),
    )
    while sum(tensors) < wanted:
        tensors.append(int(chance.integers(5, 200)))
    sizes = [size for _, _, size in cut(tensors, 32)]
    return sizes, stretches, forward + backward


def test_within_five_percent_of_the_optimum() -> None:
    """Iteration time, waiting included, against scipy's exact solution."""
    chance = np.random.default_rng(20260131)
    ratios = []
    for _ in range(INSTANCES):
        sizes, stretches, update = random_instance(chance)
        plan = plan_offload(sizes, stretches, update)
        greedy = sum(stretch.link_bytes for stretch in stretches) + sum(sizes[i] for i in plan.late)
        exact = least_seconds(sizes, stretches, update)
        assert greedy >= exact - 1e-6
        ratios.append(greedy / exact)
    print(f"greedy / exact: worst {max(ratios):.4f}, mean {np.mean(ratios):.4f}")
    assert max(ratios) <= 1.05


def test_nothing_is_snapshotted_when_everything_fits_before_the_step() -> None:
    plan = plan_offload([10, 20, 30], [Stretch(70, 0), Stretch(5, 100)], 1)
    assert plan == Schedule([0, 0, 0], 1, 2) and not plan.snapshot and not plan.late


def test_only_what_does_not_fit_is_snapshotted_and_memory_wins_over_time() -> None:
    stretches = [Stretch(50, 0), Stretch(100, 20)]
    plan = plan_offload([30, 20, 20, 20], stretches, 1)
    assert [len(part) for part in (plan.live, plan.snapshot, plan.late)] == [2, 1, 1]


RATES = {"link_bytes_per_second": 50e9, "window_seconds": 0.1, "budget_percent": 0.5}


def test_a_base_fills_what_gradients_leave_of_the_link() -> None:
    slice_bytes = FIRST_SLICE_BYTES
    for _ in range(20):
        slice_bytes = next_slice_bytes(
            slice_bytes, gradient_bytes=2 << 30, stall_seconds=0.0, **RATES
        )
    assert 0.5 < slice_bytes / (5e9 - (2 << 30)) < 1
    assert steps_left(17 * 10**9, slice_bytes) in range(6, 10)


def test_a_base_that_costs_too_much_takes_more_steps() -> None:
    assert next_slice_bytes(1 << 30, gradient_bytes=0, stall_seconds=0.01, **RATES) == 1 << 29
    unknown = {**RATES, "link_bytes_per_second": 0.0}
    assert next_slice_bytes(7, gradient_bytes=0, stall_seconds=0.0, **unknown) == 7
    crowded = next_slice_bytes(1 << 20, gradient_bytes=10**12, stall_seconds=0.0, **RATES)
    assert crowded > 0, "a base must arrive some day"


@given(allocated=st.lists(st.integers(0, 1000), max_size=8), peak=st.integers(0, 1200))
def test_kept_gradients_never_raise_the_peak(allocated: list[int], peak: int) -> None:
    plan = release_plan(allocated, peak)
    if not allocated:
        assert not plan
        return
    assert len(plan) == len(allocated) + 1 and plan[-1] == 0
    assert plan == sorted(plan, reverse=True)
    for kept, following in zip(plan, allocated, strict=False):
        assert kept == 0 or following + kept <= peak


def test_gradients_are_kept_as_long_as_there_is_room() -> None:
    assert release_plan([100, 800, 300], 1000) == [890, 190, 190, 0]
    assert release_plan([100, 1000, 300], 1000) == [890, 0, 0, 0]
