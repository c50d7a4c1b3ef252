"""Several steps of one optimizer over many tensors in a single pass: from addresses to the C library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from everystep.native import STEP, replay
from everystep.replay.rules.rule import Flag, Powers
from everystep.replay.twins import Twin, numbers_of


@dataclass
class Rows:
    """Tensors of one dtype that one optimizer moves. `times` and `fresh` advance with every pass."""

    targets: np.ndarray  # of native.TARGET
    groups: np.ndarray  # the param group of each
    times: np.ndarray  # steps that each has seen
    fresh: np.ndarray  # whether it has no momentum yet


class Step(NamedTuple):
    gradients: np.ndarray  # an address for every row; 0 where there is no gradient
    groups: Sequence[Mapping[str, Any]]
    scale: float | None = None


def run_pass(twin: Twin, rows: Rows, steps: Sequence[Step], powers: Powers, threads: int) -> None:
    table = np.zeros((len(rows.targets), len(steps)), STEP)
    for column, step in enumerate(steps):
        moved = step.gradients != 0
        rows.times[moved] += 1
        table["gradient"][:, column] = step.gradients
        for number, group in enumerate(step.groups):
            own = moved & (rows.groups == number)
            for time in np.unique(rows.times[own]):
                now = own & (rows.times == time)
                found = numbers_of(twin, group, int(time), powers, step.scale)
                table["number"][now, column] = found.values
                table["flags"][now, column] = found.flags
        begins = rows.fresh & ((table["flags"][:, column] & Flag.MOMENTUM) != 0)
        table["flags"][begins, column] |= np.uint32(Flag.FIRST)
        rows.fresh &= ~begins
    replay(twin.name, rows.targets, table, threads)
