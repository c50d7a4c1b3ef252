"""Gradients that were waiting for a later step when the state was sealed, put back on their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from everystep.core.events import GRADIENT, Presence, unpack_presence
from everystep.recover.point import RestorePoint
from everystep.recover.upload import Uploads
from everystep.replay.tensors import dtype_of, gradient_dtype, view_tensor


class Pending:
    """Collects them while a point is loaded. `finish` comes last: replaying a call clears gradients."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors = tensors  # live ones, by their atom in the found census
        self._gradients: dict[int, torch.Tensor] = {}  # by the same

    def of(self, atom: int, dtype: str) -> torch.Tensor:
        """Room for an atom's gradient, which may be of another type than the parameter."""
        kind, room = dtype_of(dtype), self._gradients.get(atom)
        if room is None or room.dtype is not kind:
            parameter = self._tensors[atom].detach()
            room = self._gradients[atom] = torch.zeros_like(parameter, dtype=kind)
        return room

    def load(self, found: RestorePoint, uploads: Uploads) -> None:
        for t in found.tensors():
            if t.slot == GRADIENT and found.session.pending.has(t.atom):
                uploads.copy(self.of(t.atom, t.dtype), view_tensor(t.data, t.dtype, t.shape))

    def finish(self, pending: Presence, atoms: Iterable[int]) -> None:
        """Give every parameter the gradient it had, or none."""
        count = max(self._tensors, default=-1) + 1
        zeros = unpack_presence(pending.zeros, count)
        sparse = unpack_presence(pending.sparse, count)
        for atom in atoms:
            parameter = self._tensors[atom]
            if pending.has(atom):
                _give(parameter, self._gradients[atom])
            elif sparse[atom]:
                parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo).detach()
            else:
                kind = gradient_dtype(parameter)
                zero = torch.zeros_like(parameter, dtype=kind).detach() if zeros[atom] else None
                parameter.grad = zero


def _give(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """torch takes no gradient of another type than this says."""
    if parameter.grad_dtype not in (None, gradient.dtype):
        parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient
