"""Which optimizers the shadow can replay, and building them there from their description."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from inspect import getattr_static, isdatadescriptor
from typing import Any

import torch

from everystep.core.census import Mode, OptimizerSpec
from everystep.text import full_name, is_text

# each element of their state depends on the same element of the gradient alone
_ELEMENT_WISE = frozenset(
    [
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "RMSprop",
        "Rprop",
        "Adagrad",
        "Adadelta",
        "ASGD",
    ]
)
_NO_LOG = {
    "LBFGS": "evaluates its closure many times a step",
    "SparseAdam": "consumes sparse gradients",
}


def class_path(optimizer: torch.optim.Optimizer) -> str:
    return full_name(type(optimizer), ":")


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the object holds beyond what every optimizer does: the counter of a Lookahead, a running mean."""
    own = vars(optimizer).items()
    return {name: value for name, value in own if name not in _names_of_every_optimizer()}


def why_no_state(optimizer: torch.optim.Optimizer, name: object) -> str | None:
    """Why an attribute of this name is neither recorded nor taken from a store, if so: what torch keeps for
    itself, and what would stand in for code."""
    if not isinstance(name, str) or not is_text(name):
        return "its name is no valid text"
    if name in _names_of_every_optimizer():
        return "torch keeps it for itself"
    found = getattr_static(type(optimizer), name, None)
    stands_in = hasattr(type(found), "__get__") and not isdatadescriptor(found)
    if callable(found) or (stands_in and not isinstance(found, cached_property)):
        return "it would stand in for code: the class has a method of that name"
    return None


@cache
def _names_of_every_optimizer() -> frozenset[str]:
    class Bare(torch.optim.Optimizer):
        """Nothing but what the base class sets."""

    # a GradScaler sets the last two before each step, and a call carries them
    return frozenset([*vars(Bare([torch.zeros(1)], {})), "grad_scale", "found_inf"])


def mode_of(path: str) -> tuple[Mode, str]:
    """How steps of this optimizer class are kept, and why."""
    module, _, name = path.partition(":")
    if not module.startswith("torch.optim"):
        return Mode.LOG, f"{path} is not torch's own: your optimizer replays at recovery"
    if name in _NO_LOG:
        return Mode.STATE, f"{name} {_NO_LOG[name]}: its state is sent as it is"
    if name in _ELEMENT_WISE:
        return Mode.REPLAY, "replayed in the shadow"
    return Mode.LOG, f"{name} works on whole matrices: your optimizer replays at recovery"


def rewrites_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` may write into `p.grad` itself; unknown optimizers may.

    A fused kernel with a GradScaler writes the unscaled gradient back; nesterov's multi-tensor code
    builds its update in it.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__qualname__ not in _ELEMENT_WISE:
        return True
    if any(getattr(optimizer, n, None) is not None for n in ("grad_scale", "found_inf")):
        return True
    return any(g.get("nesterov") or g.get("differentiable") for g in optimizer.param_groups)


def step_unseen(optimizer: torch.optim.Optimizer) -> None:
    """Without hooks, those of users included: what they did to gradients and weights was recorded."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def rebuild(
    spec: OptimizerSpec, groups: list[dict[str, Any]], parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The same optimizer on other parameters; `groups` holds every value of its param groups."""
    kind = getattr(torch.optim, spec.path.partition(":")[2])
    remaining = iter(parameters)
    built = kind(
        [
            {"params": [next(remaining) for _ in atoms], **on_cpu(values)}
            for atoms, values in zip(spec.groups, groups, strict=True)
        ]
    )
    assert isinstance(built, torch.optim.Optimizer)
    return built


def prefer_multi_tensor(optimizer: torch.optim.Optimizer) -> None:
    """On the CPU torch's single- and multi-tensor code of these give the same bits in float32 (not in
    bfloat16; the exactness tests and the fingerprints of every run check it), and the latter spends far
    less time in Python."""
    if type(optimizer).__name__ not in ("SGD", "Adam", "AdamW"):
        return
    for group in optimizer.param_groups:
        plain = not any(group.get(name) for name in ("fused", "differentiable", "capturable"))
        plain &= all(parameter.dtype is torch.float32 for parameter in group["params"])
        numbers = (group["lr"], *group.get("betas", ()))
        if plain and not any(isinstance(number, torch.Tensor) for number in numbers):
            group["foreach"] = True


def on_cpu(values: dict[str, Any]) -> dict[str, Any]:
    """Group values as a CPU optimizer takes them: `capturable` exists for CUDA graphs only."""
    return {**values, "capturable": False} if values.get("capturable") else values
