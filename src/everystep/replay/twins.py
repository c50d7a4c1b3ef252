"""Which twin redoes which optimizer, and the numbers that its steps are made of. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np

f32 = np.float32


class Twin(NamedTuple):
    """`number` is its place in the C library's table."""

    number: int
    rule: str
    dialect: str
    dtype: str


class Flag(IntFlag):
    MAXIMIZE = 1
    L2 = 2
    DECOUPLED = 4
    AMSGRAD = 8
    FIRST = 16
    NESTEROV = 32
    MOMENTUM = 64
    SCALED = 128
    LANES = 256


_SCALE, _DECAY, _LR, _BETA1, _BETA2, _BIAS1, _BIAS2, _EPS, _WEIGHT1, _WEIGHT2 = range(10)
_ORDER = (
    ("adam", "foreach", "float32"),
    ("adam", "single", "float32"),
    ("adam", "fused", "float32"),
    ("adam", "foreach", "bfloat16"),
    ("adam", "single", "bfloat16"),
    ("adam", "fused", "bfloat16"),
    ("sgd", "ops", "float32"),
    ("sgd", "cpu", "float32"),
    ("sgd", "ops", "bfloat16"),
    ("sgd", "fused", "bfloat16"),
    ("adam", "cpu", "float32"),
    ("adam", "mkl", "float32"),
)
TWINS = {"-".join(names): Twin(number, *names) for number, names in enumerate(_ORDER)}

RULES = {"SGD": "sgd", "Adam": "adam", "AdamW": "adam"}
SLOTS = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}

Powers = Mapping[float, np.ndarray]
"""For a base (a beta in float32) its powers 1, 2, 3… as the device computes them; later ones are 0."""


class Numbers(NamedTuple):
    values: tuple[float, ...]
    flags: Flag


def rule_of(path: str) -> str | None:
    module, _, name = path.partition(":")
    return RULES.get(name) if module.startswith("torch.optim") else None


def slots_of(rule: str, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Tensors that a step of this rule keeps beside each parameter, in the twin's order."""
    if rule == "sgd":
        return SLOTS[rule] if group["momentum"] else ()
    return SLOTS[rule] if group["amsgrad"] else SLOTS[rule][:2]


def is_ordinary(group: Mapping[str, Any]) -> bool:
    """Whether the twins know all that this group asks for."""
    odd = group.get("capturable") or group.get("differentiable")
    return not odd and all(isinstance(beta, float) for beta in group.get("betas", ()))


def numbers_of(
    twin: Twin, group: Mapping[str, Any], time: int, powers: Powers, scale: float | None
) -> Numbers:
    """What step number `time` computes with; `scale` is what a GradScaler told a fused optimizer."""
    flags = Flag.MAXIMIZE if group["maximize"] else Flag(0)
    values = [0.0] * 10
    if scale is not None:
        values[_SCALE], flags = scale, flags | Flag.SCALED
    fill = _sgd if twin.rule == "sgd" else _adam_fused if twin.dialect == "fused" else _adam
    flags |= fill(twin, values, group, time, powers)
    return Numbers(tuple(values), flags)


def _sgd(
    twin: Twin, values: list[float], group: Mapping[str, Any], time: int, powers: Powers
) -> Flag:
    values[_LR] = float(group["lr"])
    values[_DECAY] = float(group["weight_decay"])
    values[_BETA1], values[_BETA2] = float(group["momentum"]), 1 - float(group["dampening"])
    flags = Flag.L2 if values[_DECAY] else Flag(0)
    flags |= Flag.MOMENTUM if group["momentum"] else Flag(0)
    return flags | (Flag.NESTEROV if group["nesterov"] else Flag(0))


def _adam(
    twin: Twin, values: list[float], group: Mapping[str, Any], time: int, powers: Powers
) -> Flag:
    """torch computes these in double precision and each is rounded once. But a learning rate that is a tensor
    of float32, here a number of numpy's, makes torch round after every operation that it takes part in."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    kind = f32 if isinstance(lr, np.float32) else float
    root = (1 - beta2**time) ** 0.5
    values[_LR] = -float(lr / kind(1 - beta1**time))
    values[_BETA2], values[_EPS] = beta2, group["eps"]
    values[_BIAS2] = 1 / root if twin.dialect == "single" else root
    values[_WEIGHT1], values[_WEIGHT2] = 1 - beta1, 1 - beta2
    return _decay(values, group, decoupled=float(kind(1) - lr * kind(group["weight_decay"])))


def _adam_fused(
    twin: Twin, values: list[float], group: Mapping[str, Any], time: int, powers: Powers
) -> Flag:
    """The kernel computes these in float32, the powers by the device's own function."""
    beta1, beta2 = (f32(beta) for beta in group["betas"])
    values[_LR], values[_BETA1], values[_BETA2] = float(group["lr"]), float(beta1), float(beta2)
    values[_BIAS1] = float(f32(1) - _power(powers, beta1, time))
    values[_BIAS2] = float(np.sqrt(f32(1) - _power(powers, beta2, time)))
    values[_EPS] = group["eps"]
    flags = _decay(values, group, decoupled=float(f32(group["lr"]) * f32(group["weight_decay"])))
    return flags | Flag.LANES if flags & Flag.L2 else flags


def _decay(values: list[float], group: Mapping[str, Any], *, decoupled: float) -> Flag:
    flags = Flag.AMSGRAD if group["amsgrad"] else Flag(0)
    if not group["weight_decay"]:
        return flags
    if group["decoupled_weight_decay"]:
        values[_DECAY] = decoupled
        return flags | Flag.DECOUPLED
    values[_DECAY] = float(group["weight_decay"])
    return flags | Flag.L2


def _power(powers: Powers, beta: np.float32, time: int) -> np.float32:
    known = powers.get(float(beta))
    if known is None:  # it came after attach: within the last bit or two of what the device has
        return f32(float(beta) ** time)
    return f32(known[time - 1]) if time <= len(known) else f32(0)


def powers_needed(beta: float) -> int:
    """How many powers differ from 0 so much that subtracting them from 1 shows in float32."""
    base = float(f32(beta))
    if not 0 < base < 1:
        return 1
    return math.ceil(-27 * math.log(2) / math.log(base))
