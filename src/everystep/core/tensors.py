"""A tensor somewhere: in a file, in shared memory, or at hand."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from everystep.core.dtypes import tensor_bytes
from everystep.core.numbers import Natural, Shape, Step
from everystep.core.regions import Region

P = TypeVar("P")
Q = TypeVar("Q")


class Span(msgspec.Struct, frozen=True):
    """Bytes of one of several holders: files of a base, or pieces of shared memory."""

    holder: Natural
    at: Natural
    bytes: Natural

    def held_by(self, holder: int) -> Span:
        return Span(holder, self.at, self.bytes)

    def of(self, data: memoryview) -> memoryview:
        return data[self.at : self.at + self.bytes]


class TensorRef(msgspec.Struct, Generic[P], frozen=True, omit_defaults=True):
    """A tensor of an atom: `slot` is empty for its value, else "<optimizer key>/<name>" or GRADIENT.
    `version` is the step at which the atom changed last. `shape` is that of the elements that lie here."""

    atom: Natural
    slot: str
    dtype: str
    shape: Shape
    version: Step
    place: P
    regions: tuple[Region, ...] = ()  # of the logical tensor that lie here; none: it is whole

    @property
    def key(self) -> tuple[int, str]:
        return self.atom, self.slot

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)

    @property
    def data(self: TensorRef[memoryview]) -> memoryview:
        return self.place

    def at(self, place: Q) -> TensorRef[Q]:
        """The same, where its bytes lie elsewhere."""
        return TensorRef(
            self.atom, self.slot, self.dtype, self.shape, self.version, place, self.regions
        )


Held = TensorRef[memoryview]
"""One that is in memory, ready to be read."""
Stored = TensorRef[Span]
