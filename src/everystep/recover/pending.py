"""Gradients that were waiting for a later step when the state was sealed, put back on their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from everystep.core.events import GRADIENT, Presence, unpack_presence
from everystep.recover.find import Found
from everystep.recover.upload import Uploads
from everystep.replay.tensors import view_tensor


class Pending:
    """Collects them while a point is loaded. `finish` comes last: replaying a call clears gradients."""

    def __init__(self, tensors: Sequence[torch.Tensor], ids: dict[int, int]) -> None:
        self._tensors, self._ids = tensors, ids
        self._gradients: dict[int, torch.Tensor] = {}  # by the atom of the stored census

    def of(self, atom: int) -> torch.Tensor:
        """Room for an atom's gradient."""
        if atom not in self._gradients:
            self._gradients[atom] = torch.zeros_like(self._tensors[self._ids[atom]]).detach()
        return self._gradients[atom]

    def load(self, found: Found, uploads: Uploads) -> None:
        for t in found.tensors():
            if t.slot == GRADIENT and found.session.pending.has(t.atom):
                uploads.copy(self.of(t.atom), view_tensor(t.data, t.dtype, t.shape))

    def finish(self, pending: Presence, atoms: Iterable[int]) -> None:
        """Give every parameter the gradient it had, or none."""
        count = max(self._ids, default=-1) + 1
        zeros = unpack_presence(pending.zeros, count)
        sparse = unpack_presence(pending.sparse, count)
        for atom in atoms:
            parameter = self._tensors[self._ids[atom]]
            if pending.has(atom):
                parameter.grad = self.of(atom)
            elif sparse[atom]:
                parameter.grad = torch.zeros_like(parameter, layout=torch.sparse_coo).detach()
            else:
                parameter.grad = torch.zeros_like(parameter).detach() if zeros[atom] else None
