"""Makes a failing program smaller while it fails in the same way: greedily, one change at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from storm.draw import PARTS, is_valid
from storm.program import REGISTRIES, Pick, Program, to_json

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, *, tries: int = 60) -> Program:
    """The smallest program found that `fails`. Larger changes come first, again after each success."""
    left, progress, tried = tries, True, {to_json(program)}
    while progress and left > 0:
        progress = False
        for smaller in candidates(program):
            if to_json(smaller) in tried:
                continue
            tried.add(to_json(smaller))
            left -= 1
            if fails(smaller):
                program, progress = smaller, True
                break
            if left <= 0:
                break
    return program


def essence(program: Program) -> frozenset[str]:
    """The parts of a shrunk program that are not the simplest: what has them all fails alike."""
    return frozenset(
        f"{registry} {pick.name}"
        for registry, pick in program.picks()
        if isinstance(getattr(program, registry), tuple) or pick.name != next(iter(PARTS[registry]))
    )


def candidates(program: Program) -> Iterator[Program]:
    """Every program that is one step simpler."""
    for smaller in (*_without(program), *_simpler(program), *_shorter(program), *_plainer(program)):
        if is_valid(smaller):
            yield smaller


def _without(program: Program) -> Iterator[Program]:
    """First without all parts of several registries, then of one, then without one part."""
    yield _with(program, states=(), edits=(), options=())
    for registry in ("states", "edits", "options"):
        yield _with(program, **{registry: ()})
    for registry in REGISTRIES:
        picks = getattr(program, registry)
        if isinstance(picks, tuple):
            for i in range(len(picks)):
                yield _with(program, **{registry: (*picks[:i], *picks[i + 1 :])})


def _simpler(program: Program) -> Iterator[Program]:
    """The first part of a registry is the simplest."""
    for registry in REGISTRIES:
        pick = getattr(program, registry)
        first = next(iter(PARTS[registry].values()))
        if isinstance(pick, Pick) and pick.name != first.name:
            values = {name: choices[0] for name, choices in first.params.items()}
            yield _with(program, **{registry: Pick(first.name, values)})


def _shorter(program: Program) -> Iterator[Program]:
    for steps in (program.steps // 2, program.steps - 2):
        if steps >= 3:
            yield _cut(program, steps)


def _cut(program: Program, steps: int) -> Program:
    """What happened late happens earlier."""

    def earlier(pick: Pick) -> Pick:
        at = pick.values.get("at")
        return pick if at is None else _value(pick, "at", max(1, min(at, steps - 1)))

    faults = tuple(map(earlier, program.faults))
    return _with(program, steps=steps, faults=faults, edits=tuple(map(earlier, program.edits)))


def _plainer(program: Program) -> Iterator[Program]:
    """The first choice of a parameter is the simplest; a fault may strike earlier."""
    for registry in REGISTRIES:
        picks = getattr(program, registry)
        several = picks if isinstance(picks, tuple) else (picks,)
        for i, pick in enumerate(several):
            for name, choices in PARTS[registry][pick.name].params.items():
                value = pick.values.get(name)
                simple = choices[0] if choices else max(1, (value or 1) // 2)
                if value != simple:
                    changed = _value(pick, name, simple)
                    whole = (*several[:i], changed, *several[i + 1 :])
                    yield _with(
                        program, **{registry: whole if isinstance(picks, tuple) else changed}
                    )


def _value(pick: Pick, name: str, value: Any) -> Pick:
    return Pick(pick.name, {**pick.values, name: value})


def _with(program: Program, **changes: Any) -> Program:
    return msgspec.structs.replace(program, **changes)
