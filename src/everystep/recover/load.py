"""Puts a found point into live models and optimizers, replaying the log tail through the latter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch

from everystep.compression.compressor import forget_residual
from everystep.core.census import Census, mismatches
from everystep.core.events import GRADIENT, Call, Edit, Rebase, SlotValues
from everystep.errors import CorruptData, ModelMismatch
from everystep.format.entry import checked_entries
from everystep.format.optimizer import decode_values
from everystep.lane.runtime import ShadowCard
from everystep.recover.expand import Expander
from everystep.recover.find import RestorePoint
from everystep.recover.pending import Pending
from everystep.recover.slots import SlotLoader, in_order
from everystep.recover.upload import Uploads
from everystep.replay.apply import apply_call, set_groups, write_edit
from everystep.replay.extras import check_attributes
from everystep.replay.optimizers import class_path
from everystep.replay.tensors import Payload, distinct, unpack, view_tensor

log = logging.getLogger(__name__)

_LISTED = 10
_T = TypeVar("_T")


def find_and_load(
    find: Callable[..., tuple[RestorePoint | None, ShadowCard | None]],
    load: Callable[[RestorePoint], _T],
) -> tuple[tuple[RestorePoint, _T] | None, ShadowCard | None]:
    """A log is read while it is redone. If a record turns out to be damaged then, begin again and check all
    of them before anything is loaded: so it is known where they end."""
    try:
        return _load_or_close(*find(verify_lazily=True), load)
    except CorruptData as error:
        problem = str(error)  # not the error itself, which holds on to all that was loaded
    log.warning("damage_met_on_the_way error=%s", problem)
    return _load_or_close(*find(verify_lazily=False), load)


def _load_or_close(
    found: RestorePoint | None, card: ShadowCard | None, load: Callable[[RestorePoint], _T]
) -> tuple[tuple[RestorePoint, _T] | None, ShadowCard | None]:
    if found is None:
        return None, card
    try:
        return (found, load(found)), card
    except BaseException:
        found.close()
        raise


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


def load_values(
    found: RestorePoint, tensors: Sequence[torch.Tensor], ids: dict[int, int], uploads: Uploads
) -> list[int]:
    """Copy every atom's value into its live tensor; returns the versions of the live atoms.

    `ids` maps the atoms of the found census to live ones.
    """
    versions = [0] * len(tensors)
    for t in found.tensors():
        if t.atom in ids and t.slot != GRADIENT:
            versions[ids[t.atom]] = t.version
            if not t.slot:
                value = view_tensor(t.data, t.dtype, t.shape)
                uploads.copy(*distinct(tensors[ids[t.atom]].detach(), value))
    return versions


def same_atoms(live: Census, found: Census) -> dict[int, int]:
    """Live atom for every found one, by name."""
    by_name = {atom.name: i for i, atom in enumerate(live.atoms)}
    return {i: by_name[a.name] for i, a in enumerate(found.atoms) if a.name in by_name}


def check_optimizers(
    found: RestorePoint,
    optimizers: Mapping[str, torch.optim.Optimizer],
    tensors: Sequence[torch.Tensor],
    ids: dict[int, int],
    *,
    later_groups: bool = False,
) -> None:
    """Refuse optimizers that are not the run's, before anything is changed. `later_groups`: they may have
    more param groups than the run had then."""
    specs = {spec.key: i for i, spec in enumerate(found.census.optimizers)}
    if specs.keys() != optimizers.keys():
        raise ModelMismatch(
            f"resume: the run has optimizers {sorted(specs)}, given were {sorted(optimizers)}",
            hint="give attach the same optimizers under the same keys",
        )
    others = [
        f"optimizer {key!r}: {path} in the run, {class_path(optimizer)} in the script"
        for key, optimizer in optimizers.items()
        if (path := found.census.optimizers[specs[key]].path) != class_path(optimizer)
    ]
    if others:
        raise ModelMismatch(
            "resume: the run was trained with another optimizer class:\n  " + "\n  ".join(others),
            hint="build the optimizer as it was, or give this one another run=; "
            "everystep.restore(run, model) loads weights alone",
        )
    for key, optimizer in optimizers.items():
        _check_groups(found.census, specs[key], optimizer, tensors, ids, later=later_groups)
        if encoded := _encoded(found, specs[key]):
            check_attributes(optimizer, decode_values(encoded, unpack).attributes or ())


def load_optimizers(
    found: RestorePoint,
    optimizers: Sequence[tuple[str, torch.optim.Optimizer]],
    tensors: Sequence[torch.Tensor],
    ids: dict[int, int],
    uploads: Uploads,
) -> None:
    """Groups and slots of every optimizer."""
    specs = {spec.key: i for i, spec in enumerate(found.census.optimizers)}
    for key, optimizer in optimizers:
        index = specs[key]
        optimizer.state.clear()
        if encoded := _encoded(found, index):
            set_groups(optimizer, encoded)
    slots = _slot_loader(found, optimizers, tensors, ids)
    for t in found.tensors():
        if t.slot and t.slot != GRADIENT:
            room = slots.replace(t.atom, t.slot, t.dtype, t.shape)
            uploads.copy(room, view_tensor(t.data, t.dtype, t.shape))


def _encoded(found: RestorePoint, optimizer: int) -> bytes:
    """What the seal of a point says of an optimizer; empty where it says nothing."""
    return found.session.groups[optimizer] if optimizer < len(found.session.groups) else b""


def redo_tail(
    found: RestorePoint,
    optimizers: Sequence[tuple[str, torch.optim.Optimizer]],
    tensors: Sequence[torch.Tensor],
    ids: dict[int, int],
    pending: Pending,
) -> None:
    """Slots that are no tensors, whatever the log tail still holds, then gradients that wait for a step."""
    specs = {spec.key: i for i, spec in enumerate(found.census.optimizers)}
    by_index = {specs[key]: optimizer for key, optimizer in optimizers}
    slots = _slot_loader(found, optimizers, tensors, ids)
    for atom, index, encoded in found.session.values:
        slots.values(SlotValues(atom, index, encoded))
    for _, optimizer in optimizers:
        in_order(optimizer)
    _replay_tail(found, by_index, tensors, ids, slots, pending)
    pending.finish(found.session.pending, found.census.parameters)


def _slot_loader(
    found: RestorePoint,
    optimizers: Sequence[tuple[str, torch.optim.Optimizer]],
    tensors: Sequence[torch.Tensor],
    ids: dict[int, int],
) -> SlotLoader:
    specs = {spec.key: i for i, spec in enumerate(found.census.optimizers)}
    by_index = {specs[key]: optimizer for key, optimizer in optimizers}
    return SlotLoader(found.census, by_index, lambda atom: tensors[ids[atom]])


def _check_groups(
    census: Census,
    index: int,
    optimizer: torch.optim.Optimizer,
    tensors: Sequence[torch.Tensor],
    ids: dict[int, int],
    *,
    later: bool,
) -> None:
    """Groups may be missing (they were added during the run); those that are there must agree."""
    spec = census.optimizers[index]
    stored = [[tensors[ids[atom]] for atom in group] for group in spec.groups]
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


def add_groups(
    census: Census,
    optimizers: Mapping[str, torch.optim.Optimizer],
    tensors: Sequence[torch.Tensor],
    ids: dict[int, int],
) -> bool:
    """Param groups that were added during the run; True: there were some."""
    added = 0
    for spec in census.optimizers:
        optimizer = optimizers[spec.key]
        stored = [[tensors[ids[atom]] for atom in group] for group in spec.groups]
        for parameters in stored[len(optimizer.param_groups) :]:
            optimizer.add_param_group({"params": parameters})
            added += 1
    return added > 0


def remove_later_groups(census: Census, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Undo every `add_param_group` since a census: training is taken back to it."""
    for spec in census.optimizers:
        if optimizer := optimizers.get(spec.key):
            for group in optimizer.param_groups[len(spec.groups) :]:
                for parameter in group["params"]:
                    optimizer.state.pop(parameter, None)
                    forget_residual(optimizer, parameter)
            del optimizer.param_groups[len(spec.groups) :]


def _replay_tail(
    found: RestorePoint,
    optimizers: dict[int, torch.optim.Optimizer],
    tensors: Sequence[torch.Tensor],
    ids: dict[int, int],
    slots: SlotLoader,
    pending: Pending,
) -> None:
    frames = chain([found.tail], (record.body for record in found.log))
    entries = chain.from_iterable(checked_entries(f, found.census, "log") for f in frames)
    with Expander(found.census, tensors) as expander:
        for events, payload in expander.payloads(entries):
            for event in events:
                if isinstance(event, Call):
                    _replay_call(event, payload, found, optimizers, tensors, ids)
                elif isinstance(event, Edit):
                    waits = event.slot == GRADIENT
                    target = pending.of(event.atom, event.dtype) if waits else slots.target(event)
                    write_edit(target, event, payload)
                elif isinstance(event, SlotValues):
                    slots.values(event)
                elif isinstance(event, Rebase):
                    slots.rebase(event)
    for index, optimizer in optimizers.items():  # a tail leaves the scalars of its last call
        if encoded := _encoded(found, index):
            set_groups(optimizer, encoded)


def _replay_call(
    call: Call,
    payload: Payload,
    found: RestorePoint,
    optimizers: dict[int, torch.optim.Optimizer],
    tensors: Sequence[torch.Tensor],
    ids: dict[int, int],
) -> None:
    spec = found.census.optimizers[call.optimizer]
    parameters = [tensors[ids[atom]] for atom in spec.atoms]
    apply_call(optimizers[call.optimizer], parameters, call, found.census, payload)
