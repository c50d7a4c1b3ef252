"""What a rule of an optimizer says of itself, and the row of numbers that `native/replay.c` reads.

No torch in here, nor in any rule."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, IntFlag
from typing import Any, ClassVar

import numpy as np

f32 = np.float32
Group = Mapping[str, Any]  # values of a param group

Powers = Mapping[float, np.ndarray]
"""For a base (a beta in float32) its powers 1, 2, 3… as the device computes them; later ones are 0."""


class Flag(IntFlag):
    MAXIMIZE = 1
    L2 = 2
    DECOUPLED = 4
    AMSGRAD = 8
    FIRST = 16
    NESTEROV = 32
    MOMENTUM = 64
    SCALED = 128
    LANES = 256


class Number(IntEnum):
    """Places in a step's row."""

    SCALE = 0
    DECAY = 1
    LR = 2
    BETA1 = 3
    BETA2 = 4
    BIAS1 = 5
    BIAS2 = 6
    EPS = 7
    WEIGHT1 = 8
    WEIGHT2 = 9
    FACTOR = 3  # SGD's names for two of them
    DAMPING = 4


Row = list[float]


class Rule:
    """How the steps of an optimizer are computed. One instance stands for it, as RULE of its module."""

    name: ClassVar[str]
    optimizers: ClassVar[tuple[str, ...]]  # classes of torch.optim
    dialects: ClassVar[
        tuple[tuple[str, str], ...]
    ]  # and dtypes: each is a twin in the C library's table
    slots: ClassVar[tuple[str, ...]]  # all that it may keep beside a parameter, in the twin's order
    counts_steps: ClassVar[bool] = False  # in a slot "step"
    begins_with_zeros: ClassVar[bool] = True  # slots do; else the first gradient fills them
    takes_roots: ClassVar[bool] = (
        False  # square roots, and a CPU has them from the chip or from MKL
    )
    # for the table of `everystep selfcheck`: title, class of torch.optim, settings
    probes: ClassVar[tuple[tuple[str, str, dict[str, Any]], ...]]

    def slots_of(self, group: Group) -> tuple[str, ...]:
        """The slots that a step with these settings keeps."""
        return self.slots

    def fill(self, row: Row, dialect: str, group: Group, time: int, powers: Powers) -> Flag:
        """Write what step number `time` computes with into the row."""
        raise NotImplementedError

    def unfit_on_cpu(self, group: Group) -> str:
        """Why no twin is looked for, if so: what torch computes in another way in the last elements of a
        tensor, which a probe may miss."""
        return ""


def power(powers: Powers, beta: np.float32, time: int) -> np.float32:
    known = powers.get(float(beta))
    if known is None:  # it came after attach: within the last bit or two of what the device has
        return f32(float(beta) ** time)
    return f32(known[time - 1]) if time <= len(known) else f32(0)
