"""A found point, put into live models and optimizers."""

from __future__ import annotations

from pathlib import Path

import torch

from everystep.capture.census import LiveCensus
from everystep.core.census import Mode
from everystep.recover.find import Found
from everystep.recover.load import (
    check_model,
    check_optimizers,
    load_optimizers,
    load_values,
    redo_tail,
    same_atoms,
)
from everystep.recover.pending import Pending
from everystep.recover.upload import Uploads


def load_point(found: Found, live: LiveCensus, path: Path, *, optimizers: bool) -> list[int]:
    """Put a found point into live objects; returns the versions of the atoms."""
    check_model(live.census, found, str(path))
    ids = same_atoms(live.census, found.census)
    keyed = [
        (spec.key, optimizer)
        for spec, optimizer in zip(live.census.optimizers, live.optimizers, strict=True)
    ]
    if optimizers:
        check_optimizers(found, keyed, live.tensors, ids)
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
