"""Which steps of a run can be gone back to, and how to have more of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from everystep.errors import StoreError
from everystep.store.bases import read_base
from everystep.store.log_reader import LogReader
from everystep.store.runs import Candidate, Lineage

HOW_TO_HAVE_MORE = (
    "to have more next time: durable_log=1 keeps every step since the oldest of the last bases, "
    "keep=Keep(last=…, every=…) keeps more bases, a shorter durable_every writes them more often"
)
_SHOWN_MAX = 12


def whole_bases(lineage: Lineage) -> list[Candidate]:
    """Those that can be resumed from, newest first."""
    return [c for c in lineage.candidates if not c.weights_only]


def reachable(run: Path, lineage: Lineage) -> tuple[list[int], set[int]]:
    """Steps of whole bases, and all steps that these and the log behind them bring back, damage aside."""
    whole = whole_bases(lineage)[::-1]
    steps: set[int] = set()
    for candidate, following in zip_longest(whole, whole[1:]):
        until = following.entry.step if following else None
        try:
            census = read_base(run, candidate).census
            steps |= set(LogReader(run, lineage, candidate.point, census, until).steps)
        except StoreError:  # a base that cannot be read brings nothing back
            continue
        steps.add(candidate.entry.step)
    return sorted({c.entry.step for c in whole} & steps), steps


def describe_reachable(bases: list[int], steps: set[int], in_memory: int | None = None) -> str:
    """For whoever asked for a step that cannot be had."""
    newest = max((*steps, *(() if in_memory is None else (in_memory,))), default=None)
    if newest is None:
        return f"there is no step to go back to; {HOW_TO_HAVE_MORE}"
    logged = [(first, last) for first, last in stretches(steps) if first < last]
    parts = [f"the newest, {newest}", f"bases of steps {listed(map(str, bases))}"]
    if logged:
        words = listed(f"from {first} to {last}" for first, last in logged)
        parts.append(f"by the log every step {words}")
    return f"steps to go back to: {'; '.join(parts)}; {HOW_TO_HAVE_MORE}"


def stretches(steps: Iterable[int]) -> list[tuple[int, int]]:
    """Steps without a gap, as the first and the last of each stretch."""
    found: list[tuple[int, int]] = []
    for step in sorted(steps):
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


def listed(words: Iterable[str]) -> str:
    """The last ones are worth most."""
    all_of_them = list(words)
    left_out = len(all_of_them) - _SHOWN_MAX
    shown = ", ".join(all_of_them[-_SHOWN_MAX:]) or "none"
    return f"{shown} (and {left_out} older ones)" if left_out > 0 else shown
