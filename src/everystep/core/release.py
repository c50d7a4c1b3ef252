"""When gradients that are still being copied must give way: memory wins over time."""

from __future__ import annotations

from collections.abc import Sequence

_MARGIN = 0.01  # of the peak: a forward needs scratch memory between two looks


def release_plan(allocated: Sequence[int], peak: int) -> list[int]:
    """How many bytes may be kept after the step, and still after each release point, so that the peak does
    not rise.

    `allocated` is what a forward without us had allocated at each point, `peak` the most that was ever
    allocated. After the last point nothing is kept, because what follows was not seen.
    """
    if not allocated:
        return []
    room = int(peak * (1 - _MARGIN))
    plan: list[int] = []
    for here in allocated:
        before = plan[-1] if plan else room
        plan.append(max(0, min(before, room - here)))
    return [*plan, 0]
