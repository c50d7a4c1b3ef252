"""Which twin replays an optimizer's steps: found at attach, on the user's own device and settings."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from everystep.console import announce
from everystep.native import Missing, missing
from everystep.replay.optimizers import class_path, on_cpu
from everystep.replay.rules.rule import Rule
from everystep.replay.selfcheck import Probe, device_powers, differences, drift, in_one_thread
from everystep.replay.tensors import dtype_name
from everystep.replay.twins import is_ordinary, rule_of

_BOUND_STEPS = 20
_SETTINGS = ("lr", "weight_decay", "eps", "momentum", "dampening")
_known: dict[Any, set[str]] = {}  # a choice holds for a process: its device and torch stay


class Choice(NamedTuple):
    twins: dict[str, str]  # for each dtype; {} where torch has to replay
    powers: dict[float, bytes]
    why: str


def choose(optimizer: torch.optim.Optimizer) -> Choice:
    """A twin for every dtype among the parameters, each equal in every bit that was compared."""
    path, rule = class_path(optimizer), rule_of(class_path(optimizer))
    only_cpu = all(p.device.type == "cpu" for g in optimizer.param_groups for p in g["params"])
    # nothing else that is tried here has torch start threads
    with in_one_thread() if only_cpu and rule is not None and rule.takes_roots else nullcontext():
        return _choose(optimizer, path)


def _choose(optimizer: torch.optim.Optimizer, path: str) -> Choice:
    reason = _unfit(optimizer, path)
    if reason:
        return Choice({}, {}, reason + _bound(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    twins: dict[str, str] = {}
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        found = _twin(optimizer, device, dtype)
        if found is None:
            reason = f"no twin gives the bits of {path} in {dtype} on {device}"
            return Choice({}, {}, reason + _bound(optimizer))
        twins[dtype_name(torch.empty(0, dtype=dtype), "parameter")] = found
    betas = {b for group in optimizer.param_groups for b in group.get("betas", ())}
    encoded = (
        _encoded_powers(frozenset(betas), device) if "fused" in "".join(twins.values()) else {}
    )
    return Choice(
        twins, encoded, f"replayed by {', '.join(sorted(twins.values()))}: equal in every bit"
    )


@cache
def _encoded_powers(betas: frozenset[float], device: torch.device) -> dict[float, bytes]:
    powers = device_powers(betas, device) or {}
    return {beta: table.tobytes() for beta, table in powers.items()}


def _unfit(optimizer: torch.optim.Optimizer, path: str) -> str:
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    rule = rule_of(path)
    if rule is None:
        return f"there is no twin of {path}"
    if (absent := missing()) is not None:
        _tell(absent)
        return absent.why
    if len({p.device for p in parameters}) != 1 or parameters[0].device.type not in ("cpu", "cuda"):
        return "parameters of several devices, or of one that was never looked at"
    if not all(p.is_floating_point() for p in parameters):
        return "parameters of several devices or kinds"
    if not all(is_ordinary(group) for group in groups):
        return "capturable, differentiable or with tensors for betas"
    reason = _unfit_on_cpu(rule, groups) if parameters[0].device.type == "cpu" else ""
    return reason or _unfit_tensors(groups)


@cache
def _tell(absent: Missing) -> None:
    """Once in a process: nobody would find out why the shadow is slow, or a GPU's run not exact."""
    if not absent.asked:
        announce(
            f"{absent.why}, so torch replays every step: more slowly, and bit for bit only on a CPU. "
            f"To change that: {absent.remedy}"
        )


def _unfit_on_cpu(rule: Rule, groups: list[dict[str, Any]]) -> str:
    """Why these settings are unfit: torch computes the last elements of a tensor in another way, and a
    probe may miss that."""
    if any(group.get("fused") for group in groups):
        return "the CPU's fused kernel rounds the ends of tensors in another way"
    return next((why for group in groups if (why := rule.unfit_on_cpu(group))), "")


def _unfit_tensors(groups: list[dict[str, Any]]) -> str:
    """Settings may be tensors, and torch computes with those in ways of their own."""
    tensors = [v for g in groups for k, v in g.items() if k in _SETTINGS and torch.is_tensor(v)]
    if any(t.dtype not in (torch.float32, torch.float64) for t in tensors):
        return "a setting that is a tensor of another type than float32 or float64"
    scalars = any(p.dim() == 0 for group in groups for p in group["params"])
    if scalars and any(t.dtype is torch.float64 for t in tensors):
        return "a setting that is a tensor of float64 and a parameter without dimensions"
    if any(torch.is_tensor(g["lr"]) and g["lr"].is_cuda and not g.get("fused") for g in groups):
        return "a learning rate on the device, for a kernel that is not fused"
    return ""


def _twin(optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype) -> str | None:
    """The one that is equal for every param group."""
    left: set[str] | None = None
    for group in optimizer.param_groups:
        settings = _settings(group)
        # the probe changes the learning rate as it goes: a schedule does not make it another one
        key = (type(optimizer), device, dtype, repr({**settings, "lr": _kind(settings["lr"])}))
        if key not in _known:
            build = partial(_rebuilt, type(optimizer), settings)
            found = differences(build, device, dtype, Probe())
            _known[key] = {name for name, differing in found.items() if not differing}
        left = _known[key] if left is None else left & _known[key]
    fused = any(group.get("fused") for group in optimizer.param_groups)
    # settings may leave no difference between two: later ones may, so the kernel's own comes first
    return min(left, key=lambda name: (("fused" in name) != fused, name)) if left else None


def _bound(optimizer: torch.optim.Optimizer) -> str:
    """How far torch on the CPU will get from the device; "" where they are the same."""
    group = next(group for group in optimizer.param_groups if group["params"])  # some are empty
    parameter = group["params"][0]
    if parameter.device.type == "cpu":
        return ""
    settings = {**_settings(group), "lr": float(group["lr"])}
    there = partial(_rebuilt, type(optimizer), settings)
    here = partial(_rebuilt, type(optimizer), on_cpu(settings))
    probe = Probe(steps=_BOUND_STEPS)
    try:
        far = drift(there, here, parameter.device, parameter.dtype, probe)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"; how far the CPU gets from it could not be measured ({error})"
    return f"; after {probe.steps} steps on the CPU a value was off by up to {far:.1e} of itself"


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What the group was made with; the probe changes a learning rate, and a tensor is the user's own."""
    return {
        k: v.detach().clone() if isinstance(v, torch.Tensor) else v
        for k, v in group.items()
        if k not in ("params", "initial_lr")
    }


def _kind(lr: Any) -> str:
    return f"{lr.dtype} {lr.device} {lr.dim()}" if isinstance(lr, torch.Tensor) else "number"


def _rebuilt(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], parameters: list[Any]
) -> torch.optim.Optimizer:
    return kind([{**settings, "params": parameters}])  # type: ignore[call-arg]
