"""Whether a restore point is of this model and these optimizers. Nothing live is changed here."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from everystep.core.census import Census, OptimizerSpec, mismatches
from everystep.errors import ModelMismatch
from everystep.format.optimizer import decode_values
from everystep.recover.point import RestorePoint
from everystep.replay.extras import check_attributes
from everystep.replay.optimizers import class_path
from everystep.replay.tensors import unpack

_LISTED = 10
Tensors = Mapping[int, torch.Tensor]  # live ones, by their atom in the found census


def same_atoms(live: Census, found: Census) -> dict[int, int]:
    """Live atom for every found one, by name."""
    by_name = {atom.name: i for i, atom in enumerate(live.atoms)}
    return {i: by_name[a.name] for i, a in enumerate(found.atoms) if a.name in by_name}


def check_model(live: Census, found: RestorePoint, run: str) -> None:
    """Refuse a run of another model, naming up to ten differences."""
    lines = mismatches(live, found.census)
    if lines:
        shown = "\n  ".join(lines[:_LISTED])
        more = f"\n  and {len(lines) - _LISTED} more" if len(lines) > _LISTED else ""
        raise ModelMismatch(
            f"resume {run} at step {found.point.step}: it holds another model:\n  {shown}{more}",
            hint="build the model as it was, or give this one another run=",
        )


def check_optimizers(
    found: RestorePoint,
    optimizers: Mapping[str, torch.optim.Optimizer],
    tensors: Tensors,
    *,
    later_groups: bool,
) -> None:
    """Refuse optimizers that are not the run's. `later_groups`: they may have more param groups than the run
    had then."""
    specs = {spec.key: spec for spec in found.census.optimizers}
    if specs.keys() != optimizers.keys():
        raise ModelMismatch(
            f"resume: the run has optimizers {sorted(specs)}, given were {sorted(optimizers)}",
            hint="give attach the same optimizers under the same keys",
        )
    others = [
        f"optimizer {key!r}: {path} in the run, {class_path(optimizer)} in the script"
        for key, optimizer in optimizers.items()
        if (path := specs[key].path) != class_path(optimizer)
    ]
    if others:
        raise ModelMismatch(
            "resume: the run was trained with another optimizer class:\n  " + "\n  ".join(others),
            hint="build the optimizer as it was, or give this one another run=; "
            "everystep.restore(run, model) loads weights alone",
        )
    for key, optimizer in optimizers.items():
        _check_groups(specs[key], optimizer, tensors, later=later_groups)
        if encoded := found.group_values(found.census.places[key]):
            check_attributes(optimizer, decode_values(encoded, unpack).attributes or ())


def _check_groups(
    spec: OptimizerSpec, optimizer: torch.optim.Optimizer, tensors: Tensors, *, later: bool
) -> None:
    """Groups may be missing (they were added during the run); those that are there must agree."""
    stored = [[tensors[atom] for atom in group] for group in spec.groups]
    for number, (group, expected) in enumerate(zip(optimizer.param_groups, stored, strict=False)):
        if [id(p) for p in group["params"]] != [id(p) for p in expected]:
            raise ModelMismatch(
                f"resume: optimizer {spec.key!r}, group {number}: the run has other parameters in it",
                hint="build the param groups as they were when the run began",
            )
    if len(optimizer.param_groups) > len(stored) and not later:
        raise ModelMismatch(
            f"resume: optimizer {spec.key!r} has {len(optimizer.param_groups)} groups, "
            f"the run has {len(stored)}",
            hint="add later param groups after attach, at the step where they were added",
        )
