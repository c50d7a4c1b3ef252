"""What cannot be recorded is refused at attach, by its name, before anything is started."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from everystep.capture.groups import GroupValues
from everystep.errors import UnsupportedState, UsageError
from everystep.format import values
from everystep.replay.tensors import is_resolved, pack, why_not_stored
from everystep.text import is_text

if TYPE_CHECKING:
    from everystep.capture.census import LiveCensus


def named(given: Any, what: str, kind: type) -> dict[str, Any]:
    """One object, or several under their names."""
    found = dict(given) if isinstance(given, Mapping) else {"": given}
    for name, member in found.items():
        if not isinstance(name, str) or not is_text(name):
            raise UsageError(
                f"attach: {what} under the key {values.shown(name)}, expected a string",
                hint='give each a name: {"net": ..., "head": ...}',
            )
        if not isinstance(member, kind):
            raise UsageError(
                f"attach: {what} {name!r} is a {type(member).__name__}, expected a {kind.__name__}"
            )
    return found


def check_atom(name: str, tensor: torch.Tensor, *, buffer: bool) -> None:
    """Parameters and buffers lie in memory as they are."""
    what = "buffer" if buffer else "parameter"
    if not is_text(name):
        raise UsageError(f"attach: {what} {name!r}: its name is no valid text", hint="rename it")
    reason = why_not_stored(tensor)
    if reason is None and not is_resolved(tensor):
        reason = "it is a lazy conjugate or negative", "use x.resolve_conj().resolve_neg()"
    if reason is not None:
        words, hint = reason
        raise UnsupportedState(f"attach: {what} {name!r} cannot be stored: {words}", hint=hint)


def check_optimizers(live: LiveCensus) -> None:
    """Everything that optimizers hold now can be encoded."""
    for index, (spec, optimizer) in enumerate(
        zip(live.census.optimizers, live.optimizers, strict=True)
    ):
        GroupValues(optimizer, spec.key).encoded()
        for atom in spec.atoms:
            values.encode(live.slots_of(index, atom).others, live.where(index, atom), pack)
        _warn_of_unnamed_state(spec.key, optimizer)


def _warn_of_unnamed_state(key: str, optimizer: torch.optim.Optimizer) -> None:
    """State of a tensor that is in no group has no name to be stored under."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = [k for k in optimizer.state if isinstance(k, torch.Tensor) and id(k) not in known]
    if strange:
        warnings.warn(
            f"everystep: optimizer[{key!r}].state holds something of {len(strange)} tensors that are in none "
            "of its param groups: it is not recorded",
            stacklevel=2,
        )


def refuse_many_ranks() -> None:
    """This version records one process per run."""
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        if ranks > 1:
            raise UsageError(
                f"attach: {ranks} ranks; this version records one process per run",
                hint="attach with a world size of 1",
            )
        return
    said = os.environ.get("WORLD_SIZE", "")  # by torchrun
    if said.isdigit() and int(said) > 1:
        raise UsageError(
            f"attach: WORLD_SIZE={said} in the environment, but no process group is initialised",
            hint="call torch.distributed.init_process_group before attach; this version records one rank "
            "only, so start one process, or unset WORLD_SIZE if this one trains alone",
        )
