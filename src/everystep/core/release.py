"""When gradients that are still being copied must give way: memory wins over time."""

from __future__ import annotations

from collections.abc import Sequence

_MARGIN = 0.01  # of the peak: a forward needs scratch memory between two looks


def release_plan(allocated: Sequence[int], peak: int, parts: Sequence[int]) -> list[int]:
    """How many parts may still be kept after each release point, so that the peak does not rise.

    `allocated` is what a forward without us had allocated at each point, `peak` the most that was ever
    allocated, `parts` are the bytes of the parts in the order in which they are let go. Empty: none may
    be kept at all. After the last point none is, because what follows was not seen.
    """
    room = peak * (1 - _MARGIN)
    if not allocated or allocated[0] + sum(parts) > room:
        return []
    plan: list[int] = []
    kept = len(parts)
    for following in allocated[1:]:
        while kept and following + sum(parts[len(parts) - kept :]) > room:
            kept -= 1
        plan.append(kept)
    return [*plan, 0]
