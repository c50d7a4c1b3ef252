"""Param groups of live optimizers, brought to those that a run had."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from everystep.compression.compressor import forget_residual
from everystep.core.census import Census


def add_groups(
    census: Census,
    optimizers: Mapping[str, torch.optim.Optimizer],
    tensors: Mapping[int, torch.Tensor],
) -> bool:
    """Those that were added during the run; True: there were some."""
    added = 0
    for spec in census.optimizers:
        optimizer = optimizers[spec.key]
        stored = [[tensors[atom] for atom in group] for group in spec.groups]
        for parameters in stored[len(optimizer.param_groups) :]:
            optimizer.add_param_group({"params": parameters})
            added += 1
    return added > 0


def remove_later_groups(census: Census, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Take back every `add_param_group` since a census: training goes back to it."""
    for spec in census.optimizers:
        if optimizer := optimizers.get(spec.key):
            for group in optimizer.param_groups[len(spec.groups) :]:
                for parameter in group["params"]:
                    optimizer.state.pop(parameter, None)
                    forget_residual(optimizer, parameter)
            del optimizer.param_groups[len(spec.groups) :]
