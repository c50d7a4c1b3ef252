"""How training looks at a seal: whether it is still there is asked when the step has to be recorded again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Set

import torch

from everystep.capture.census import LiveCensus
from everystep.capture.watching.slot_digests import digests_of_slots, digests_of_values
from everystep.capture.watching.state_stamp import Hints, StateStamp

_BYTES_PER_STEP = 4 << 20  # of weights, and of each optimizer's slots


class GradientStamps:
    """Which gradients there are, and their versions. Objects are compared: ids are used again."""

    def __init__(self, live: LiveCensus) -> None:
        found = ((a, live.tensors[a].grad) for a in live.census.parameters)
        self._seen = {a: (weakref.ref(g), g._version) for a, g in found if g is not None}

    def differing(self, live: LiveCensus) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Atoms whose gradient was computed, cleared or written, and that gradient."""
        for atom in live.census.parameters:
            gradient, (was, version) = live.tensors[atom].grad, self._seen.get(atom, _NOTHING)
            if gradient is not was() or (gradient is not None and gradient._version != version):
                yield atom, gradient

    def have_moved_on(self, live: LiveCensus, consumed_by: Set[int]) -> bool:
        """Whether a record made now would lack gradients that waited, or hold newer ones. Those that an
        optimizer had consumed may be cleared."""
        specs = zip(live.census.optimizers, live.optimizers, strict=True)
        consumed = {a for spec, o in specs if id(o) in consumed_by for a in spec.atoms}
        return any(
            atom not in consumed or not (gradient is None or is_zero(gradient))
            for atom, gradient in self.differing(live)
        )


def _no_gradient() -> None:
    """Stands for a reference to none."""


_NOTHING: tuple[Callable[[], torch.Tensor | None], int] = (_no_gradient, 0)


def is_zero(gradient: torch.Tensor) -> bool:
    """In every bit: a negative zero is another number."""
    if gradient.layout is not torch.strided:
        return gradient._nnz() == 0
    flat = gradient.detach().contiguous().view(-1)
    return not bool(flat.view(torch.uint8).any())


class TrainingStamp:
    """How tensors, slots and gradients look at a seal. Writes through `.data` show on the CPU only, in their
    bytes; elsewhere hints are all there is. Most steps that are not recorded never have to be, so that of
    what is large a part is looked at, in turn."""

    def __init__(self, live: LiveCensus) -> None:
        self.live = live
        moved = {atom for spec in live.census.optimizers for atom in spec.atoms}
        written = [i for i, a in enumerate(live.census.atoms) if i in moved or a.buffer]
        self._bytes = [digests_of_values(live, written, lambda: _BYTES_PER_STEP)]
        on_the_cpu = [any(live.tensors[a].is_cpu for a in s.atoms) for s in live.census.optimizers]
        self._bytes += [
            digests_of_slots(live, i, lambda: _BYTES_PER_STEP)
            for i, here in enumerate(on_the_cpu)
            if here
        ]

    def mark(self) -> None:
        """Remember what is there now."""
        self.live.follow()
        self._atoms = Hints(self.live.tensors)
        self._slots = [StateStamp(optimizer) for optimizer in self.live.optimizers]
        for digests in self._bytes:
            digests.mark(replaced=True)
        self._gradients = GradientStamps(self.live)

    def still_hold(self, consumed_by: set[int]) -> bool:
        live = self.live
        return (
            not live.follow()
            and Hints(live.tensors) == self._atoms
            and all(s.still_holds(o) for s, o in zip(self._slots, live.optimizers, strict=True))
            and not self._gradients.have_moved_on(live, consumed_by)
            and not any(digests.differ() for digests in self._bytes)
        )
