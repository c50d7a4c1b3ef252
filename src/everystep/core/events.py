"""What happened in a step, in order. A record is the list of events up to and including a seal.

Tensor bytes do not travel inside events: they lie in the payload, `at` bytes from its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from everystep.core.census import ALIGN_BYTES, Census, gradient_layout
from everystep.core.numbers import Natural, Shape, Step

GRADIENT = "grad"  # in place of a slot: what `backward` left on the parameter for a later step
AmpName = Literal["grad_scale", "found_inf"]  # what a GradScaler tells an optimizer
AMP_BYTES = 2 * ALIGN_BYTES  # behind a call's gradients there is room for what a GradScaler says


class Presence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Gradients that a seal found on the parameters, a bit per atom; the others are None. `zeros` and
    `sparse` ones are zero, or were consumed and will be cleared."""

    zeros: bytes = b""
    held: bytes = b""  # their values are edits of the slot GRADIENT
    sparse: bytes = b""  # layout sparse_coo

    def has(self, atom: int) -> bool:
        """Whether this atom's gradient is held."""
        return atom < 8 * len(self.held) and bool(self.held[atom // 8] >> atom % 8 & 1)


class Edit(msgspec.Struct, frozen=True, tag="edit", array_like=True, gc=False):
    """`nbytes` bytes of one tensor, from byte `start` on: the atom's value (slot ""), one of its optimizer
    slots ("<optimizer key>/<name>") or its gradient (slot GRADIENT)."""

    atom: Natural
    slot: str
    dtype: str
    shape: Shape
    start: Natural
    nbytes: Natural
    at: Natural


class SlotValues(msgspec.Struct, frozen=True, tag="values", array_like=True, gc=False):
    """The parts of one atom's optimizer state that are not plain tensors, encoded."""

    atom: Natural
    optimizer: Natural
    values: bytes


class Rebase(msgspec.Struct, frozen=True, tag="rebase", array_like=True, gc=False):
    """The edits of these atoms in this record are their whole state at this step; `versions` tells
    when each last changed, so that an unchanged atom is not written to the store again."""

    atoms: tuple[Natural, ...]
    versions: tuple[Step, ...]


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True, gc=False):
    """One optimizer call: the gradients it consumed (`presence` has a bit per atom of the optimizer:
    None is not zero) and every scalar of its groups."""

    optimizer: Natural
    groups: bytes
    presence: bytes
    at: Natural
    amp: dict[AmpName, Natural]  # where each lies in the payload, a float32


class Fingerprints(msgspec.Struct, frozen=True, tag="prints", array_like=True, gc=False):
    """Digests of tensors (atom, slot) as they are at the seal, eight bytes each."""

    tensors: tuple[tuple[Natural, str], ...]
    at: Natural


class Sparse(msgspec.Struct, frozen=True, tag="sparse", array_like=True, gc=False):
    """Only in logs, first in its entry: the payload of `bytes` bytes is stored as those of its words that
    are not zero (`format.sparse`)."""

    bytes: Natural
    blocks: Natural
    words: Natural


class Planes(msgspec.Struct, frozen=True, tag="planes", array_like=True, gc=False):
    """Only in logs, first in its entry: the payload of `bytes` bytes is stored as byte planes of elements of
    `width` bytes, in compressed chunks of these sizes (`format.planes`)."""

    bytes: Natural
    width: Natural
    sizes: tuple[Natural, ...]


class Seal(msgspec.Struct, frozen=True, tag="seal", array_like=True, gc=False):
    """The end of step `step`. An empty `state` or group means: as in the record before."""

    step: Step
    after: Step  # the step this record follows; a gap shows here
    rng: bytes
    state: bytes
    groups: tuple[bytes, ...]
    time_ns: Natural  # by the clock that only goes forward, the same one in all processes of a host
    metric: float | None = None  # what the user reported last
    pending: Presence = Presence()


Event = Edit | SlotValues | Rebase | Call | Fingerprints | Sparse | Planes | Seal


def used_ranges(events: Iterable[Event], census: Census) -> list[tuple[int, int]]:
    """Where an entry's payload holds something (start, bytes), in a fixed order: gaps between tensors and
    gradients that are not there hold anything."""
    found: list[tuple[int, int]] = []
    for event in events:
        if isinstance(event, Edit):
            found.append((event.at, event.nbytes))
        elif isinstance(event, Fingerprints):
            found.append((event.at, 8 * len(event.tensors)))
        elif isinstance(event, Call):
            layout = gradient_layout(census, event.optimizer)
            present = unpack_presence(event.presence, len(layout.offsets))
            rows = zip(layout.offsets, layout.sizes, present, strict=True)
            found += [(event.at + offset, size) for offset, size, there in rows if there]
            found += [(at, 4) for at in event.amp.values()]
    return [row for row in found if row[1]]


def pack_presence(present: list[bool]) -> bytes:
    bits = sum(1 << i for i, there in enumerate(present) if there)
    return bits.to_bytes(presence_bytes(len(present)), "little")


def presence_bytes(count: int) -> int:
    """How many a packed presence has."""
    return -(-count // 8) or 1


def unpack_presence(packed: bytes, count: int) -> list[bool]:
    bits = int.from_bytes(packed, "little")
    return [bool(bits >> i & 1) for i in range(count)]
