"""When each piece of state leaves the device, if all of it must within one iteration.

State does not change between two steps, so a piece can be *offloaded* (device to host) as it is. Pieces
that the link cannot take in that time are *snapshotted* (device to device, fast) right before the step, when
activations are gone, and offloaded after it. Where there is no memory for a snapshot either, the step waits.
The idea is Checkflow's (IEEE CAL 24(2), 2025), which solves an integer programme. This algorithm is greedy;
a test compares it with the exact solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stretch(NamedTuple):
    """Of an iteration."""

    link_bytes: int  # what the link can take meanwhile, beside what it carries anyway
    free_bytes: int  # memory that can be used meanwhile without raising the peak


class Schedule(NamedTuple):
    """For every piece the stretch it is offloaded in; `len(stretches)` stands for "the step waits"."""

    stretch_of: list[int]
    update: int
    stretches: int

    @property
    def live(self) -> list[int]:
        return [i for i, stretch in enumerate(self.stretch_of) if stretch < self.update]

    @property
    def snapshot(self) -> list[int]:
        return [i for i, p in enumerate(self.stretch_of) if self.update <= p < self.stretches]

    @property
    def late(self) -> list[int]:
        return [i for i, stretch in enumerate(self.stretch_of) if stretch == self.stretches]


def cut(sizes: Sequence[int], limit: int) -> list[tuple[int, int, int]]:
    """Tensors in pieces of at most `limit` bytes: (tensor, start, bytes)."""
    return [
        (number, start, min(limit, size - start))
        for number, size in enumerate(sizes)
        for start in range(0, size, limit)
    ]


def plan_offload(sizes: Sequence[int], stretches: Sequence[Stretch], update: int) -> Schedule:
    """Spread pieces over stretches; the step overwrites them at the start of stretch `update`.

    Large pieces come first, each in the stretch before the update where it fits most tightly. The rest become
    snapshots, each in the earliest stretch after the update that has link and memory left.
    """
    link = [stretch.link_bytes for stretch in stretches]
    free = [stretch.free_bytes for stretch in stretches]
    stretch_of = [len(stretches)] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[piece]
        before = [s for s in range(update) if link[s] >= size]
        if before:
            chosen = min(before, key=lambda s: link[s])
        else:
            behind = range(update, len(stretches))
            fits = (s for s in behind if link[s] >= size and min(free[update : s + 1]) >= size)
            chosen = next(fits, len(stretches))
            for s in (
                range(update, min(chosen + 1, len(stretches))) if chosen < len(stretches) else ()
            ):
                free[s] -= size
        if chosen < len(stretches):
            link[chosen] -= size
        stretch_of[piece] = chosen
    return Schedule(stretch_of, update, len(stretches))
