"""Which optimizer call a hook belongs to, where one optimizer's `step` calls another's, or its base class's.

The frames on the stack tell. A count of calls would not: torch runs no post-hook when a step raises.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType

import torch


def _unhooked(self: object) -> None:
    """Stands for a step, to learn what torch wraps one in."""


_STEP_CODE = torch.optim.Optimizer.profile_hook_step(_unhooked).__code__


def outer_call(index_of: Mapping[int, int]) -> int | None:
    """The outermost of the given optimizers (`id` -> index) whose step encloses the one that runs now."""
    outer, own = None, True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP_CODE:
            if not own:
                outer = index_of.get(id(frame.f_locals["args"][0]), outer)
            own = False
        frame = frame.f_back
    return outer
