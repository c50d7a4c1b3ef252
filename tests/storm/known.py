"""Failures that are known and open, each with the parts it takes: they are counted, but they fail nothing.

Delete an entry when its fault is mended. The list is to be empty.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from storm.program import Program


class Known(NamedTuple):
    kind: str  # a pattern of the failure's class
    parts: str  # "registry name" by comma, all of which the program has; "a|b" is either
    why: str


KNOWN: tuple[Known, ...] = (
    Known(
        "wrong bits: weights",
        "optimizer nested",
        "a parameter that an optimizer of mode log and one of mode replay both move",
    ),
    Known(
        "wrong bits: weights at resume",
        "optimizer muon",
        "an optimizer of mode log, resumed from a shadow and then from the store",
    ),
    Known(
        "wrong bits",
        "faults kill_shadow, faults close|faults raise",
        "a turn done while no shadow was there is not sealed at the end, yet in the base taken then",
    ),
    Known(
        "wrong bits|wrong turns",
        "loop again, faults kill_shadow",
        "break and steps again repeat a turn while nothing is recorded",
    ),
    Known("trainer lost and moved", "faults moved", "the shadow of a moved run is not found"),
    Known(
        "refused to resume: CorruptData in format/document.py",
        "faults flip",
        "a flipped bit of everystep.json refuses the run without a hint",
    ),
    Known(
        "raised: ModelMismatch in recover/load.py:_check_groups",
        "loop interrupted, edits later_group",
        "a turn that added a param group cannot be taken back",
    ),
)


def known(program: Program, kind: str) -> str:
    """Why this program fails like this, or nothing."""
    picked = {f"{registry} {pick.name}" for registry, pick in program.picks()}
    return next((k.why for k in KNOWN if re.search(k.kind, kind) and _has(picked, k.parts)), "")


def _has(picked: set[str], parts: str) -> bool:
    wanted = [word.strip() for word in parts.split(",") if word.strip()]
    return all(any(re.fullmatch(one, name) for name in picked) for one in wanted)
