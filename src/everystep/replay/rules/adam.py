"""Adam and AdamW."""

from __future__ import annotations

import numpy as np

from everystep.replay.rules.rule import Flag, Group, Number, Powers, Row, Rule, f32, power


class Adam(Rule):
    name = "adam"
    optimizers = ("Adam", "AdamW")
    dialects = (
        ("foreach", "float32"),
        ("single", "float32"),
        ("fused", "float32"),
        ("foreach", "bfloat16"),
        ("single", "bfloat16"),
        ("fused", "bfloat16"),
        ("cpu", "float32"),
        ("mkl", "float32"),
    )
    slots = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    counts_steps = True
    takes_roots = True
    probes = (
        ("Adam", "Adam", {}),
        ("Adam, L2", "Adam", {"weight_decay": 0.01}),
        ("Adam, amsgrad, maximize", "Adam", {"amsgrad": True, "maximize": True}),
        ("AdamW", "AdamW", {}),
        ("AdamW, amsgrad", "AdamW", {"amsgrad": True}),
    )

    def slots_of(self, group: Group) -> tuple[str, ...]:
        return self.slots if group["amsgrad"] else self.slots[:2]

    def fill(self, row: Row, dialect: str, group: Group, time: int, powers: Powers) -> Flag:
        if dialect == "fused":
            return _fill_fused(row, group, time, powers)
        return _fill(row, dialect, group, time)

    def unfit_on_cpu(self, group: Group) -> str:
        if group["betas"][0] == 0:
            return (
                "with a first beta of 0 the CPU signs zeros at the ends of tensors in another way"
            )
        return ""


def _fill(row: Row, dialect: str, group: Group, time: int) -> Flag:
    """torch computes these in double precision and each is rounded once. But a learning rate that is a tensor
    of float32, here a number of numpy's, makes torch round after every operation that it takes part in."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    kind = f32 if isinstance(lr, np.float32) else float
    root = (1 - beta2**time) ** 0.5
    row[Number.LR] = -float(lr / kind(1 - beta1**time))
    row[Number.BETA2], row[Number.EPS] = beta2, group["eps"]
    row[Number.BIAS2] = 1 / root if dialect == "single" else root
    row[Number.WEIGHT1], row[Number.WEIGHT2] = 1 - beta1, 1 - beta2
    return _decay(row, group, decoupled=float(kind(1) - lr * kind(group["weight_decay"])))


def _fill_fused(row: Row, group: Group, time: int, powers: Powers) -> Flag:
    """The kernel computes these in float32, the powers by the device's own function."""
    beta1, beta2 = (f32(beta) for beta in group["betas"])
    row[Number.LR] = float(group["lr"])
    row[Number.BETA1], row[Number.BETA2] = float(beta1), float(beta2)
    row[Number.BIAS1] = float(f32(1) - power(powers, beta1, time))
    row[Number.BIAS2] = float(np.sqrt(f32(1) - power(powers, beta2, time)))
    row[Number.EPS] = group["eps"]
    flags = _decay(row, group, decoupled=float(f32(group["lr"]) * f32(group["weight_decay"])))
    return flags | Flag.LANES if flags & Flag.L2 else flags


def _decay(row: Row, group: Group, *, decoupled: float) -> Flag:
    flags = Flag.AMSGRAD if group["amsgrad"] else Flag(0)
    if not group["weight_decay"]:
        return flags
    if group["decoupled_weight_decay"]:
        row[Number.DECAY] = decoupled
        return flags | Flag.DECOUPLED
    row[Number.DECAY] = float(group["weight_decay"])
    return flags | Flag.L2


RULE = Adam()
