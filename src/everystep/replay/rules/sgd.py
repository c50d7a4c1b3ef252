"""SGD, with and without momentum."""

from __future__ import annotations

from everystep.replay.rules.rule import Flag, Group, Number, Powers, Row, Rule


class SGD(Rule):
    name = "sgd"
    optimizers = ("SGD",)
    dialects = (
        ("ops", "float32"),
        ("cpu", "float32"),
        ("ops", "bfloat16"),
        ("fused", "bfloat16"),
    )
    slots = ("momentum_buffer",)
    begins_with_zeros = False
    probes = (
        ("SGD", "SGD", {"momentum": 0.9}),
        ("SGD, nesterov, L2", "SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    )

    def slots_of(self, group: Group) -> tuple[str, ...]:
        return self.slots if group["momentum"] else ()

    def fill(self, row: Row, dialect: str, group: Group, time: int, powers: Powers) -> Flag:
        row[Number.LR] = float(group["lr"])
        row[Number.DECAY] = float(group["weight_decay"])
        row[Number.FACTOR] = float(group["momentum"])
        row[Number.DAMPING] = 1 - float(group["dampening"])
        flags = Flag.L2 if row[Number.DECAY] else Flag(0)
        flags |= Flag.MOMENTUM if group["momentum"] else Flag(0)
        return flags | (Flag.NESTEROV if group["nesterov"] else Flag(0))


RULE = SGD()
