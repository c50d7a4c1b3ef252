"""How much of a base travels at each step, so that training does not notice."""

from __future__ import annotations

import math
from collections.abc import Sequence

_FINGERPRINT_SHARE = 0.001  # of training's time
_FINGERPRINT_EVERY_MIN, _FINGERPRINT_EVERY_MAX = 16, 1024
FIRST_SLICE_BYTES = 64 << 20
_SLICE_BYTES_MIN = 4 << 20
_SHARE = 0.8  # of what the link can take besides gradients; measured rates are never quite steady
_EARLY_SHARE = 0.9  # of the bytes: the many small parameters are not worth a hook each
_SMOOTHING = 0.2
_HOOK_SECONDS = 60e-6  # of the training thread, for one hook at one step, as measured on a GPU


def next_slice_bytes(
    last: int,
    *,
    link_bytes_per_second: float,
    window_seconds: float,
    gradient_bytes: int,
    stall_seconds: float,
    budget_percent: float,
) -> int:
    """Bytes of state for the next step. Gradients go first, state fills the rest of the link.

    `window_seconds` is the time from one step to the next, in which state does not change; the last
    slice cost `stall_seconds`. Rates that are not known yet are 0.
    """
    if not link_bytes_per_second or not window_seconds:
        return last
    if stall_seconds > window_seconds * budget_percent / 100:
        return max(_SLICE_BYTES_MIN, last // 2)
    room = int(_SHARE * (link_bytes_per_second * window_seconds - gradient_bytes))
    return max(_SLICE_BYTES_MIN, min(room, 2 * last))


def costs_too_much(
    stall_seconds: float, *, steps: int, window_seconds: float, budget_percent: float
) -> bool:
    """Whether waiting for copies took more of these steps than the budget allows."""
    return stall_seconds > steps * window_seconds * budget_percent / 100 > 0


def worth_a_hook(sizes: Sequence[int]) -> list[int]:
    """The fewest of these parameters that carry most of their bytes, in their order."""
    wanted, chosen = _EARLY_SHARE * sum(sizes), []
    for place in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if wanted <= 0:
            break
        chosen.append(place)
        wanted -= sizes[place]
    return sorted(chosen)


def early_pays(stall_seconds: float, *, steps: int, hooks: int) -> bool:
    """Whether waiting for copies took longer than sending them during backward would."""
    return stall_seconds > steps * hooks * _HOOK_SECONDS > 0


_PLANES_RATIO_MIN = 1.2
_PLANES_SHARE_MAX = 0.25  # of a step's time, beside replaying it
FINGERPRINT_SHARES_MAX = 32
_PRINTS_APART = 16


def fingerprint_every(cost_seconds: float, step_seconds: float) -> int:
    """Steps from one digest of the whole state to the next, so that they take their share of the time."""
    allowed = step_seconds * _FINGERPRINT_SHARE
    wanted = math.ceil(cost_seconds / allowed) if allowed > 0 else _FINGERPRINT_EVERY_MIN
    return min(max(wanted, _FINGERPRINT_EVERY_MIN), _FINGERPRINT_EVERY_MAX)


def fingerprint_shares(every: int) -> int:
    """In how many parts the whole state is digested, one at a time: all of it at once would be a step that
    takes longer than others. Records with digests are replayed one by one, so they do not follow closely."""
    return min(max(every // _PRINTS_APART, 1), FINGERPRINT_SHARES_MAX)


def planes_pay(ratio: float, *, pack_seconds: float, step_seconds: float) -> bool:
    """Whether a log should be compressed: it becomes much smaller, and there is time for it."""
    return ratio >= _PLANES_RATIO_MIN and pack_seconds <= _PLANES_SHARE_MAX * step_seconds


def steps_left(bytes_left: int, slice_bytes: int) -> int:
    """How many steps the rest of a base is spread over."""
    return -(-bytes_left // max(slice_bytes, 1))


def smoothed(known: float, new: float) -> float:
    """What is measured again and again, as an average that forgets; 0: nothing is known yet."""
    return known + _SMOOTHING * (new - known) if known else new


def replay_threads(cores: int) -> int:
    """Threads that replay steps; the other half of the cores is the trainer's."""
    return max(1, cores // 2)
