"""One logged optimizer call, done again on whatever parameters stand for the atoms now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from everystep.core.census import Census, gradient_layout
from everystep.core.events import Call, Edit, unpack_presence
from everystep.errors import CorruptData
from everystep.format.optimizer import decode_values
from everystep.replay.extras import set_attributes, set_other_state
from everystep.replay.optimizers import (
    on_cpu,
    prefer_multi_tensor,
    rewrites_gradients,
    step_unseen,
)
from everystep.replay.tensors import Payload, distinct, unpack_on, view_tensor, view_tensors


def apply_call(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    call: Call,
    census: Census,
    payload: Payload,
    skip: Callable[[int], bool] = lambda atom: False,
    quickly: bool = False,
) -> list[int]:
    """Step `optimizer` with the gradients and scalars of `call`; returns the atoms it moved.

    `skip` names atoms that have no base yet: to the optimizer they look like parameters without
    a gradient. `quickly` takes the multi-tensor code where it gives the same bits, and may leave anything in
    the payload.
    """
    spec = census.optimizers[call.optimizer]
    layout = gradient_layout(census, call.optimizer)
    set_groups(optimizer, call.groups)
    if quickly:
        prefer_multi_tensor(optimizer)
    present = unpack_presence(call.presence, len(spec.atoms))
    rows = zip(spec.atoms, layout.offsets, present, parameters, strict=True)
    moved = [row for row in rows if row[2] and not skip(row[0])]
    atoms = [(call.at + offset, census.atoms[atom]) for atom, offset, *_ in moved]
    gradients = view_tensors(payload, ((at, atom.dtype, atom.shape) for at, atom in atoms))
    for parameter in parameters:
        parameter.grad = None
    # an optimizer that writes into gradients (a fused kernel with a scale does) gets copies: it must not
    # write into the log, which is read again after the next crash
    copies = not quickly and (bool(call.amp) or rewrites_gradients(optimizer))
    for (*_, parameter), gradient in zip(moved, gradients, strict=True):
        parameter.grad = _laid_out(gradient.clone() if copies else gradient, parameter)
    _step(optimizer, call, parameters, payload)
    return [atom for atom, *_ in moved]


def write_edit(target: torch.Tensor, edit: Edit, payload: Payload) -> None:
    """Bytes of a tensor in row-major order, into a live one that may lie otherwise."""
    data = view_tensor(payload[edit.at : edit.at + edit.nbytes], "uint8", (edit.nbytes,))
    with torch.no_grad():
        rows = target.contiguous()
        flat = rows.view(-1).view(torch.uint8)
        flat[edit.start : edit.start + edit.nbytes].copy_(data)
        if rows.data_ptr() != target.data_ptr():
            into, elements = distinct(target, rows)
            into.copy_(elements)


def _laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Where and as autograd would have it."""
    if gradient.device != parameter.device:
        gradient = gradient.to(parameter.device)
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).detach().copy_(gradient)
    return gradient


def set_groups(optimizer: torch.optim.Optimizer, encoded: bytes) -> None:
    """Give every param group the values it had in the trainer, and no others: some optimizers add a key when
    they step. What they have by default stays: another torch may know more of it than the log does.
    State under keys that are no parameters, and attributes, come back too."""
    device = next((p.device for g in optimizer.param_groups for p in g["params"]), None)
    told = decode_values(encoded, unpack_on(device or torch.device("cpu")))
    if len(told.groups) != len(optimizer.param_groups):
        found, expected = len(told.groups), len(optimizer.param_groups)
        raise CorruptData(f"values of {found} param groups for an optimizer of {expected}")
    set_other_state(optimizer, told.state)
    if told.attributes is not None:
        set_attributes(optimizer, told.attributes, told.unrecorded)
    for group, logged in zip(optimizer.param_groups, told.groups, strict=True):
        for key in group.keys() - logged.keys() - optimizer.defaults.keys() - {"params"}:
            del group[key]
        on_cuda = any(p.is_cuda for p in group["params"])
        group.update(logged if on_cuda else on_cpu(logged))


def _step(
    optimizer: torch.optim.Optimizer,
    call: Call,
    parameters: Sequence[torch.Tensor],
    payload: Payload,
) -> None:
    for name, at in call.amp.items():  # a fused optimizer unscales, and skips, by itself
        scalar = view_tensor(payload[at : at + 4], "float32", ())
        setattr(optimizer, name, scalar.to(parameters[0].device))
    try:
        step_unseen(optimizer)
    finally:
        for name in call.amp:
            delattr(optimizer, name)
        for parameter in parameters:
            parameter.grad = None
