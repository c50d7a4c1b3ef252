"""A program drawn from a seed: a pure function. Parts are drawn by weight from those that fit."""

from __future__ import annotations

import random

from storm.parts_edits import EDITS
from storm.parts_faults import FAULTS
from storm.parts_loops import LOOPS
from storm.parts_models import MODELS
from storm.parts_optimizers import OPTIMIZERS
from storm.parts_options import OPTIONS
from storm.parts_states import STATES
from storm.parts_turns import TURNS
from storm.program import REGISTRIES, Part, Pick, Program

PARTS: dict[str, dict[str, Part]] = {
    registry: {part.name: part for part in parts}
    for registry, parts in zip(
        REGISTRIES,
        (MODELS, OPTIMIZERS, TURNS, LOOPS, STATES, EDITS, OPTIONS, FAULTS),
        strict=True,
    )
}
_STEPS = (8, 12, 12, 16, 24)
_LIKED = 4
_LATE = 0.7
_HOW_MANY = {
    "states": (0, 0, 1, 1, 2),
    "edits": (0, 1, 1, 2, 3),
    "options": (0, 1, 2, 2, 3),
    "faults": (1, 1, 2, 2, 3),
}


def draw(seed: int, only: frozenset[str] = frozenset()) -> Program:
    """The program of a seed. `only` names parts that must be in it wherever they fit."""
    chance = random.Random(f"storm {seed}")
    steps = chance.choice(_STEPS)
    tags: set[str] = set()
    picked: dict[str, list[Pick]] = {}
    for registry in REGISTRIES:
        wanted = [name for name in PARTS[registry] if name in only]
        count = max(chance.choice(_HOW_MANY[registry]), len(wanted)) if registry in _HOW_MANY else 1
        picked[registry] = []
        for _ in range(count):
            left = [p for p in _fitting(registry, tags) if _is_new(registry, p, picked[registry])]
            first = [p for p in left if p.name in wanted]
            left = first or left
            if not left:
                break
            part = chance.choices(left, [_weight(p, tags) for p in left])[0]
            tags |= part.gives
            turns = _turns(chance, steps, picked.get("edits", []) if registry == "faults" else [])
            values = {k: chance.choice(choices or turns) for k, choices in part.params.items()}
            picked[registry].append(Pick(part.name, values))
    picked["faults"] = _in_order(picked["faults"])
    single = {r: picked[r][0] for r in REGISTRIES if r not in _HOW_MANY}
    return Program(seed, steps, **single, **{r: tuple(picked[r]) for r in _HOW_MANY})


def _weight(part: Part, tags: set[str]) -> float:
    return part.weight * (_LIKED if part.likes & tags else 1)


def _turns(chance: random.Random, steps: int, edits: list[Pick]) -> range:
    """When something may happen. Faults mostly come after the edits, or they say nothing of them."""
    last = max((edit.values.get("at", 0) for edit in edits), default=0)
    late = last if chance.random() < _LATE else 0
    return range(min(late + 1, steps - 1), steps)


def _is_new(registry: str, part: Part, before: list[Pick]) -> bool:
    """Only a fault may come twice, if it ends a life."""
    repeats = registry == "faults" and "ends" in part.gives
    return repeats or all(pick.name != part.name for pick in before)


def _fitting(registry: str, tags: set[str]) -> list[Part]:
    parts = PARTS[registry].values()
    return [p for p in parts if p.needs <= tags and not p.bars & tags]


def _in_order(faults: list[Pick]) -> list[Pick]:
    """By the turn in which they strike; what happens between two lives stays behind the end of one."""
    placed = sorted((f for f in faults if "at" in f.values), key=lambda f: f.values["at"])
    others = [f for f in faults if "at" not in f.values]
    ends = [i for i, f in enumerate(placed) if "ends" in PARTS["faults"][f.name].gives]
    at = ends[0] + 1 if ends else len(placed)
    return [*placed[:at], *others, *placed[at:]]


def is_valid(program: Program) -> bool:
    """Whether every part fits those before it."""
    tags: set[str] = set()
    for registry, pick in program.picks():
        part = PARTS[registry][pick.name]
        if not part.needs <= tags or part.bars & tags:
            return False
        tags |= part.gives
    return True


def tags_of(program: Program) -> set[str]:
    return {tag for registry, pick in program.picks() for tag in PARTS[registry][pick.name].gives}


def life_of_faults(program: Program) -> list[int]:
    """In which life each fault strikes: one that ends a life is the last of it."""
    lives, life = [], 0
    for pick in program.faults:
        part = PARTS["faults"][pick.name]
        ends = "ends" in part.gives
        lives.append(max(life - 1, 0) if "between" in part.text and not ends else life)
        life += ends
    return lives


def cover(count: int, seeds: range = range(600)) -> list[Program]:
    """Programs that together have as many different parts as so many can have, greedily."""
    programs = [draw(seed) for seed in seeds]
    names = [{(registry, pick.name) for registry, pick in p.picks()} for p in programs]
    chosen: list[int] = []
    seen: set[tuple[str, str]] = set()
    for _ in range(count):
        best = max(range(len(programs)), key=lambda i: len(names[i] - seen))
        chosen.append(best)
        seen |= names[best]
    return [programs[i] for i in chosen]
