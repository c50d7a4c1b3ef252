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


KNOWN: tuple[Known, ...] = ()


def known(program: Program, kind: str) -> str:
    """Why this program fails like this, or nothing."""
    picked = {f"{registry} {pick.name}" for registry, pick in program.picks()}
    return next((k.why for k in KNOWN if re.search(k.kind, kind) and _has(picked, k.parts)), "")


def _has(picked: set[str], parts: str) -> bool:
    wanted = [word.strip() for word in parts.split(",") if word.strip()]
    return all(any(re.fullmatch(one, name) for name in picked) for one in wanted)
