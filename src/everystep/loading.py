"""A found point, put into live models and optimizers."""

from __future__ import annotations

from pathlib import Path

import torch

from everystep.capture.census import LiveCensus
from everystep.core.census import Mode
from everystep.recover.find import RestorePoint
from everystep.recover.load import (
    add_groups,
    check_model,
    check_optimizers,
    load_optimizers,
    load_values,
    redo_tail,
    same_atoms,
)
from everystep.recover.pending import Pending
from everystep.recover.upload import Uploads


def check_point(
    found: RestorePoint, live: LiveCensus, path: Path, *, later_groups: bool = False
) -> None:
    """Refuse, before anything is changed, what is not the run's. `later_groups`: those that were added since
    go before it is loaded."""
    check_model(live.census, found, str(path))
    ids = same_atoms(live.census, found.census)
    check_optimizers(found, live.keyed, live.tensors, ids, later_groups=later_groups)


def give_back_groups(found: RestorePoint, live: LiveCensus, path: Path) -> bool:
    """Give optimizers the param groups that were added during the run, or refuse, before anything is changed,
    what is not the run's. True: there were some, and what belongs to them (a residual) may be new."""
    check_point(found, live, path)
    ids = same_atoms(live.census, found.census)
    return add_groups(found.census, live.keyed, live.tensors, ids)


def load_point(found: RestorePoint, live: LiveCensus, path: Path, *, optimizers: bool) -> list[int]:
    """Put a found point into live objects that have its param groups; returns the versions of the atoms."""
    check_model(live.census, found, str(path))
    ids = same_atoms(live.census, found.census)
    keyed = list(live.keyed.items())
    pending = Pending(live.tensors, ids)
    with torch.no_grad(), Uploads() as uploads:
        versions = load_values(found, live.tensors, ids, uploads)
        if optimizers:
            pending.load(found, uploads)
            load_optimizers(found, keyed, live.tensors, ids, uploads)
    if optimizers:
        redo_tail(found, keyed, live.tensors, ids, pending)
        if found.log:
            versions = [found.point.step] * len(versions)
        if found.tail_steps:  # the log moved its atoms on: they are no longer what the base holds
            for spec in found.census.optimizers:
                for atom in spec.atoms if spec.mode is Mode.LOG else ():
                    versions[ids[atom]] = found.point.step
    return versions
