"""What a program is: parts picked from registries, with values for their parameters. A pure value.

A part carries source text for places of a script; `render.py` puts them together. To add a part, add one
entry to a registry in `parts_*.py`: drawing, rendering, running and shrinking need no word of it.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Part(msgspec.Struct, frozen=True):
    """One thing that users combine with others.

    `text` maps a place of the script to source, in which `$name` stands for a parameter. A part fits if
    everything in `needs` was given by the parts before it, and nothing in `bars`. The first part of a
    registry is the simplest: it stands in for others while a failing program is shrunk.
    """

    name: str
    text: dict[str, str] = {}
    params: dict[str, list[Any]] = {}  # a name and what it may be; the first is the simplest
    weight: float = 1.0
    gives: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    bars: frozenset[str] = frozenset()
    likes: frozenset[str] = (
        frozenset()
    )  # any of these makes it much likelier: together they go deep
    excused_by: str = ""  # a warning that says this excuses different bits, and nothing else does
    tells: str = ""  # a warning that says this is right, with no fault at all


def part(
    name: str,
    text: dict[str, str] | None = None,
    /,
    *,
    weight: float = 1.0,
    gives: str = "",
    needs: str = "",
    bars: str = "",
    likes: str = "",
    excused_by: str = "",
    tells: str = "",
    **params: list[Any],
) -> Part:
    """A part, its tags written as words."""
    words = [frozenset(tags.split()) for tags in (gives, needs, bars, likes)]
    return Part(name, text or {}, params, weight, *words, excused_by, tells)


class Pick(msgspec.Struct, frozen=True):
    """A part and the values of its parameters."""

    name: str
    values: dict[str, Any] = {}


class Program(msgspec.Struct, frozen=True):
    """A training and what happens to it. `steps` is the total; the other fields are picks, one or several."""

    seed: int
    steps: int
    model: Pick
    optimizer: Pick
    turn: Pick
    loop: Pick
    edits: tuple[Pick, ...] = ()
    states: tuple[Pick, ...] = ()
    options: tuple[Pick, ...] = ()
    faults: tuple[Pick, ...] = ()

    def picks(self) -> list[tuple[str, Pick]]:
        """Every pick with the registry it comes from, in the order in which they were drawn."""
        found: list[tuple[str, Pick]] = []
        for registry in REGISTRIES:
            value = getattr(self, registry)
            found += [(registry, p) for p in (value if isinstance(value, tuple) else (value,))]
        return found

    def __str__(self) -> str:
        words = [f"seed={self.seed} steps={self.steps}"]
        for registry in REGISTRIES:
            value = getattr(self, registry)
            several = value if isinstance(value, tuple) else (value,)
            if several:
                words.append(f"{registry}={'+'.join(map(_short, several))}")
        return " ".join(words)


REGISTRIES = ("model", "optimizer", "turn", "loop", "states", "edits", "options", "faults")


def _short(pick: Pick) -> str:
    values = ",".join(f"{k}={v}" for k, v in pick.values.items() if k != "make")
    return f"{pick.name}({values})" if values else pick.name


def to_json(program: Program) -> str:
    return msgspec.json.encode(program).decode()


def from_json(text: str) -> Program:
    return msgspec.json.decode(text, type=Program)
