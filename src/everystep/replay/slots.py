"""Which slots travel as tensors, where they lie, and making them."""

from __future__ import annotations

from typing import Any

import torch

from everystep.replay.optimizers import is_torchs
from everystep.replay.tensors import dtype_of, is_resolved, why_not_stored

_ON_CPU = ("step", "mu_product")  # where torch keeps them unless its kernels read them


def device_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], name: object, parameter: torch.Tensor
) -> torch.device:
    """Where a slot lies unless it is told otherwise."""
    read_by_kernels = group.get("capturable") or group.get("fused")
    always_there = isinstance(optimizer, torch.optim.ASGD)
    on_cpu = name in _ON_CPU and not read_by_kernels and not always_there
    return torch.device("cpu") if on_cpu else parameter.device


def split(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: torch.Tensor,
    state: dict[Any, Any],
) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    """The slots that are plain tensors, and those that are anything else."""
    tensors, others = {}, {}
    moves = not is_torchs(optimizer)  # where torch has its own, the rule knows
    for name, value in state.items():
        plain = (
            isinstance(value, torch.Tensor) and is_a_name(name) and why_not_stored(value) is None
        )
        if plain and moves:
            plain = value.device == device_of(optimizer, group, name, parameter)
        if plain and is_resolved(value):
            tensors[name] = value
        else:
            others[name] = value
    return tensors, others


def is_a_name(name: object) -> bool:
    """Whether an edit can name it."""
    return isinstance(name, str) and "/" not in name and name.isprintable()


def new_slot(
    dtype: str, shape: tuple[int, ...], parameter: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Room for a slot. Fused kernels walk memory: it must lie as its parameter does (channels_last)."""
    if tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype_of(dtype), device=device).detach()
    return torch.empty(shape, dtype=dtype_of(dtype), device=device)
