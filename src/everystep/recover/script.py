"""Where the script gives an optimizer other values than the checkpoint: the checkpoint's are used and that is
told, or the script's are kept by `override`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from everystep.core.census import Script
from everystep.errors import UsageError
from everystep.format import values
from everystep.format.optimizer import decode_values
from everystep.recover.point import RestorePoint
from everystep.replay.tensors import pack, unpack

# switched on, they need slots from the first step on
_MAKE_SLOTS = ("amsgrad", "centered", "momentum")
_SCHEDULED = ("lr", "initial_lr")


class Difference(NamedTuple):
    name: str
    key: str  # of the optimizer
    group: int
    script: Any
    checkpoint: Any

    def __str__(self) -> str:
        where = f" (optimizer {self.key!r}, group {self.group})" if self.key or self.group else ""
        script, checkpoint = map(_shown, (self.script, self.checkpoint))
        return f"{self.name}={script} in the script, {checkpoint} in the checkpoint{where}"


class Comparison(NamedTuple):
    kept: list[Difference]  # named by `override`
    told: str  # one line about the others; empty: nothing has changed in the script


NO_DIFFERENCE = Comparison([], "")


def check_override(
    names: Sequence[str],
    optimizers: Iterable[torch.optim.Optimizer],
    members: Mapping[str, Any],
) -> None:
    """Refuse names that no param group has, and values that a scheduler would set again at once."""
    known = {name for o in optimizers for group in o.param_groups for name in group} - {"params"}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"override: {unknown[0]!r} is no value of the optimizer's param groups",
            hint=f"they have {', '.join(sorted(known))}",
        )
    scheduler = _scheduler_in(members)
    driven = [name for name in names if name in _SCHEDULED]
    if scheduler and driven:
        raise UsageError(
            f"override: {driven[0]!r} is set at every step by state[{scheduler!r}], which is restored too",
            hint="change the scheduler after attach (its base_lrs, and lr in the param groups), or leave it "
            "out of state and build it as you want it to go on",
        )


def compare_values(
    keys: Iterable[str], script: Script, found: RestorePoint, members: Mapping[str, Any]
) -> Comparison:
    """Before a load. A value that the script gives as it did when the run was last attached to is no
    difference, however training has changed it since then. One that was overridden then is not overridden
    again, so that a crash is resumed exactly."""
    kept: list[Difference] = []
    overruled: list[Difference] = []
    indices = {spec.key: i for i, spec in enumerate(found.census.optimizers)}
    last = found.census.script
    for key, encoded in zip(keys, script.groups, strict=True):
        index = indices.get(key, len(indices))  # loading refuses other keys
        checkpoint = _groups(found.session.groups, index)
        before = _groups(last.groups, index)
        for number, (now, stored) in enumerate(
            zip(_groups([encoded], 0), checkpoint, strict=False)
        ):
            then = before[number] if number < len(before) else now
            for name in now.keys() & stored.keys():
                if _equal(now[name], stored[name]):
                    continue
                difference = Difference(name, key, number, now[name], stored[name])
                unchanged = _equal(now[name], then.get(name, now[name]))
                if name in script.override:
                    kept += [] if unchanged and name in last.override else [difference]
                elif not unchanged:
                    overruled.append(difference)
    for difference in kept:
        _check_slots(difference)
    return Comparison(kept, _told(overruled, members))


def keep_values(
    optimizers: Mapping[str, torch.optim.Optimizer], kept: Iterable[Difference]
) -> None:
    """After a load: what `override` names is again as the script gave it."""
    for difference in kept:
        optimizer = optimizers[difference.key]
        optimizer.param_groups[difference.group][difference.name] = difference.script
        _place_counters(optimizer)


def _groups(encoded: Sequence[bytes], index: int) -> list[dict[str, Any]]:
    found = encoded[index] if index < len(encoded) else b""
    return decode_values(found, unpack).groups if found else []


def _told(overruled: list[Difference], members: Mapping[str, Any]) -> str:
    """In one line; of several groups that differ in a value only the first is shown."""
    firsts = {d.name: d for d in reversed(overruled)}
    names = sorted(firsts)
    scheduler = _scheduler_in(members)
    if scheduler and "initial_lr" in firsts:  # lr is what the scheduler has made of it since
        names = [name for name in names if name != "lr"]
    if not names:
        return ""
    shown = "; ".join(str(firsts[name]) for name in names)
    may = [name for name in names if not (scheduler and name in _SCHEDULED)]
    listed = ", ".join(f'"{name}"' for name in may) + ("," if len(may) == 1 else "")
    hint = f" (override=({listed}) keeps the script's)" if may else ""
    return f"{shown}: the checkpoint's {'is' if len(names) == 1 else 'are'} used{hint}"


def _check_slots(difference: Difference) -> None:
    if difference.name in _MAKE_SLOTS and difference.script and not difference.checkpoint:
        raise UsageError(
            f"override: {difference.name}={_shown(difference.script)} needs optimizer slots that the "
            f"checkpoint, made with {difference.name}={_shown(difference.checkpoint)}, does not have",
            hint=f"leave {difference.name!r} out of override, or give the script another run=",
        )


def _place_counters(optimizer: torch.optim.Optimizer) -> None:
    """Where the kernel that `fused` or `capturable` choose looks for the step count."""
    for group in optimizer.param_groups:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(parameter.device if on_device else "cpu")


def _scheduler_in(members: Mapping[str, Any]) -> str:
    """The name of a scheduler that computes lr from its own state; one that waits for a plateau goes on from
    the lr it meets."""
    for name, member in members.items():
        if isinstance(member, LRScheduler) and not isinstance(member, ReduceLROnPlateau):
            return name
    return ""


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return values.encode(a, "", pack) == values.encode(b, "", pack)


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)
