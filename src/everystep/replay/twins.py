"""The twins that there are, and the numbers that their steps are made of. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from everystep.replay.rules import RULES
from everystep.replay.rules.rule import Flag, Number, Powers, Rule, f32


class Twin(NamedTuple):
    rule: Rule
    dialect: str
    dtype: str

    @property
    def name(self) -> str:
        """As the C library's table has it."""
        return f"{self.rule.name}-{self.dialect}-{self.dtype}"


TWINS = {
    twin.name: twin for rule in RULES.values() for twin in (Twin(rule, *d) for d in rule.dialects)
}


class Numbers(NamedTuple):
    values: tuple[float, ...]
    flags: Flag


def rule_of(path: str) -> Rule | None:
    module, _, name = path.partition(":")
    if not module.startswith("torch.optim"):
        return None
    return next((rule for rule in RULES.values() if name in rule.optimizers), None)


def is_ordinary(group: Mapping[str, Any]) -> bool:
    """Whether the twins know all that this group asks for."""
    odd = group.get("capturable") or group.get("differentiable")
    return not odd and all(isinstance(beta, float) for beta in group.get("betas", ()))


def numbers_of(
    twin: Twin, group: Mapping[str, Any], time: int, powers: Powers, scale: float | None
) -> Numbers:
    """What step number `time` computes with; `scale` is what a GradScaler told a fused optimizer."""
    flags = Flag.MAXIMIZE if group["maximize"] else Flag(0)
    row = [0.0] * 10
    if scale is not None:
        row[Number.SCALE], flags = scale, flags | Flag.SCALED
    flags |= twin.rule.fill(row, twin.dialect, group, time, powers)
    return Numbers(tuple(row), flags)


def powers_needed(beta: float) -> int:
    """How many powers differ from 0 so much that subtracting them from 1 shows in float32."""
    base = float(f32(beta))
    if not 0 < base < 1:
        return 1
    return math.ceil(-27 * math.log(2) / math.log(base))
