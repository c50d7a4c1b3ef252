"""What a run holds: its atoms and the optimizers that move them, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

from everystep.core.dtypes import tensor_bytes
from everystep.core.numbers import Natural, Shape

PACKED_BYTES_MAX = 256 << 10  # copies smaller than this waste most of a link's bandwidth
ALIGN_BYTES = 64  # payload blocks start on cache lines, so views of any element type are aligned


def align(offset: int, to: int = ALIGN_BYTES) -> int:
    return -(-offset // to) * to


Exactness = Literal["exact", "bounded", "lossy"]


class Mode(StrEnum):
    """How an optimizer's steps are kept."""

    REPLAY = "replay"  # the shadow applies every record to its replica
    LOG = "log"  # the shadow keeps base and log; the user's own optimizer replays at recovery
    STATE = "state"  # what a step changed is sent as it is; nothing to replay


class Atom(msgspec.Struct, frozen=True):
    """One logical tensor. `slots` of optimizers belong to it but are found later, as they appear."""

    name: str
    dtype: str
    shape: Shape
    buffer: bool = False
    aliases: tuple[str, ...] = ()
    lossy: bool = False  # too large for logs at every step: only bases hold it

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


class OptimizerSpec(msgspec.Struct, frozen=True):
    """`groups` lists atom ids, in the order of the optimizer's own parameter groups."""

    key: str
    path: str  # module:qualname
    mode: Mode
    groups: tuple[tuple[Natural, ...], ...]
    why: str = ""  # the reason for the mode, in words
    twins: dict[
        str, str
    ] = {}  # for each dtype the twin that gives this optimizer's bits; {}: torch replays

    @property
    def atoms(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(self.groups))

    @property
    def foreign(self) -> bool:
        """Whether only the user's own code, which nobody knows, can replay its calls."""
        return self.mode is Mode.LOG and not self.path.startswith("torch.optim")


_WEAKEST_FIRST = (Mode.STATE, Mode.LOG, Mode.REPLAY)


def agree_on_modes(specs: Sequence[OptimizerSpec]) -> list[OptimizerSpec]:
    """Optimizers that share an atom have one mode, the weakest of theirs: calls that move the same tensor are
    replayed in one place, in their order, or not at all."""
    agreed = list(specs)
    for _ in specs:  # an agreement with one neighbour may break the one with another
        for i, spec in enumerate(agreed):
            sharing = [s for s in agreed if not set(spec.atoms).isdisjoint(s.atoms)]
            weakest = min(sharing, key=lambda s: _WEAKEST_FIRST.index(s.mode))
            if weakest.mode is not spec.mode:
                why = f"shares parameters with {weakest.key!r}: {weakest.why}"
                agreed[i] = msgspec.structs.replace(spec, mode=weakest.mode, why=why, twins={})
    return agreed


class Script(msgspec.Struct, frozen=True):
    """What the script gave to attach. Training changes lr by itself: only this tells whether the script has
    changed since then."""

    groups: tuple[bytes, ...] = ()  # values of each optimizer's param groups, encoded as in seals
    override: tuple[str, ...] = ()


class Census(msgspec.Struct, frozen=True, dict=True):
    atoms: tuple[Atom, ...]
    optimizers: tuple[OptimizerSpec, ...]
    exactness: Exactness
    why: str = ""
    not_persistent: tuple[str, ...] = ()  # buffers that the model's own state_dict leaves out
    script: Script = Script()

    def same_training(self, other: Census) -> bool:
        """Whether records and a replica of one are records and a replica of the other."""
        return msgspec.structs.replace(self, script=other.script) == other

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Atoms that may have a gradient, those of no optimizer included."""
        return tuple(i for i, atom in enumerate(self.atoms) if not atom.buffer)

    @cached_property
    def places(self) -> dict[str, int]:
        """Of the optimizers, by key."""
        return {spec.key: i for i, spec in enumerate(self.optimizers)}

    def moved_by(self, optimizer: int) -> frozenset[int]:
        return self._moved[optimizer]

    @cached_property
    def _moved(self) -> tuple[frozenset[int], ...]:
        return tuple(frozenset(spec.atoms) for spec in self.optimizers)

    @cached_property
    def layouts(self) -> tuple[GradientLayout, ...]:
        """Of every optimizer's calls; asked for at every step."""
        sizes = [[self.atoms[atom].bytes for atom in spec.atoms] for spec in self.optimizers]
        return tuple(map(_lay_out, sizes))


class GradientLayout(NamedTuple):
    """Where a call's gradients lie in its payload, in the order of the optimizer's atoms."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int
    packed_bytes: int  # the small ones fill this much at the start, so that one copy moves them all


def gradient_layout(census: Census, optimizer: int) -> GradientLayout:
    """A gradient has its atom's own dtype and shape, and keeps its place when others are absent."""
    return census.layouts[optimizer]


def _lay_out(sizes: list[int]) -> GradientLayout:
    """Small gradients first, then the others."""
    offsets, cursor, packed = [0] * len(sizes), 0, 0
    for small in (True, False):
        for i, size in enumerate(sizes):
            if (size <= PACKED_BYTES_MAX) is small:
                offsets[i] = cursor
                cursor = align(cursor + size)
        packed = cursor if small else packed
    return GradientLayout(tuple(offsets), tuple(sizes), cursor, packed)


def mismatches(expected: Census, found: Census) -> list[str]:
    """Differences in names, shapes and dtypes between the model given and the run, in words."""
    # who stops to compress, or begins to, goes on all the same
    ours = {atom.name: atom for atom in expected.atoms if not atom.lossy}
    theirs = {atom.name: atom for atom in found.atoms if not atom.lossy}
    lines = [f"{name}: in the model, not in the run" for name in ours if name not in theirs]
    lines += [f"{name}: in the run, not in the model" for name in theirs if name not in ours]
    for name, atom in ours.items():
        other = theirs.get(name)
        if other and (atom.shape, atom.dtype) != (other.shape, other.dtype):
            lines.append(
                f"{name}: model has {atom.dtype}{list(atom.shape)}, "
                f"run has {other.dtype}{list(other.shape)}"
            )
    return lines
