"""Runs with random failures, from one to the next: what the model predicts is checked against them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from everystep.tune.model import Machine, Plan

_HOPELESS = 3.0  # a run that has wasted so many times its useful time is not followed any further

Steps = np.ndarray[Any, Any]  # by plan and run, or by plan
Seconds = np.ndarray[Any, Any]


def simulate(
    machine: Machine, plans: Sequence[Plan], *, steps: int, runs: int, seed: int = 0
) -> Seconds:
    """Wasted time per unit of useful time until so many steps are done, by plan (rows) and run (columns).
    In the same run every plan meets the same failures. A run that gets nowhere ends with what it wasted."""
    chance = np.random.default_rng(seed)
    shape = (len(plans), runs)
    training = _Training(machine, plans)
    clock = np.zeros(shape)
    done, base = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    recovery: Seconds = np.zeros(shape)  # from a failure until training goes on
    active = np.ones(shape, bool)
    hopeless = (1 + _HOPELESS) * steps * machine.iteration_seconds
    while active.any():
        gap = np.broadcast_to(chance.exponential(machine.mtbf_seconds, runs), shape)
        left = gap - recovery  # less than none: it fails again while it recovers
        reached = training.step_after(done, base, np.maximum(left, 0))
        ends = active & (left >= 0) & (reached >= steps)
        rest = training.seconds(done, base, np.full(shape, steps))
        clock += np.where(ends, recovery + rest, np.where(active, gap, 0.0))
        active &= ~ends & (clock < hopeless)
        fails = active & (left >= 0)
        newest_step, newest_base = training.durable(done, base, reached)
        done, base = np.where(fails, newest_step, done), np.where(fails, newest_base, base)
        replay = (done - base) * machine.replay_seconds_per_step
        recovery = machine.restart_seconds + machine.base_load_seconds + replay
    return clock / (steps * machine.iteration_seconds) - 1


class _Training:
    """From the step it begins with, behind a base, until the next failure. A base begins when the newest is
    f steps old, a write of the log after every b steps; the trainer stalls then."""

    def __init__(self, machine: Machine, plans: Sequence[Plan]) -> None:
        self._machine = machine
        self._every = np.array([[plan.base_every] for plan in plans])
        self._batch = np.array([[plan.batch] for plan in plans])
        self._spread = np.array([[plan.spread] for plan in plans])
        written = np.where(self._batch > 0, machine.record_stall_seconds, 0.0)
        self._step_seconds = machine.iteration_seconds + written

    def seconds(self, begin: Steps, base: Steps, step: Steps) -> Seconds:
        """Until a step is done, with the stalls it brought."""
        stalled = self._bases(begin, base, step) * self._machine.base_stall_seconds
        stalled = stalled + self._writes(begin, step) * self._machine.write_stall_seconds
        return (step - begin) * self._step_seconds + stalled

    def step_after(self, begin: Steps, base: Steps, seconds: Seconds) -> Steps:
        """The newest step that is done by then."""
        low, high = begin, begin + (seconds / self._step_seconds).astype(np.int64) + 1
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = self.seconds(begin, base, middle) <= seconds
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return low

    def durable(self, begin: Steps, base: Steps, step: Steps) -> tuple[Steps, Steps]:
        """The step that a failure leaves, and the base that it is replayed from."""
        written = self._bases(begin, base, step - self._spread)
        newest = self._first_base(begin, base) + (written - 1) * self._every
        found = np.where(written > 0, newest, base)
        logged = begin + self._writes(begin, step) * self._batch
        kept = np.where(self._batch > 0, np.maximum(logged, found), found)
        return kept, found

    def _first_base(self, begin: Steps, base: Steps) -> Steps:
        first: Steps = np.maximum(begin + 1, base + self._every)
        return first

    def _bases(self, begin: Steps, base: Steps, step: Steps) -> Steps:
        behind = step - self._first_base(begin, base)
        count: Steps = np.maximum(0, behind // self._every + 1)
        return count

    def _writes(self, begin: Steps, step: Steps) -> Steps:
        return np.where(self._batch > 0, (step - begin) // np.maximum(self._batch, 1), 0)
