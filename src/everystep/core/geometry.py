"""How large the ring is: a pure function of what must fit and what memory there is."""

from __future__ import annotations

from typing import NamedTuple

from everystep.core.census import Census, align, gradient_layout
from everystep.core.events import AMP_BYTES
from everystep.errors import NotEnoughMemory

RING_HEADER_BYTES = 4096
SLOT_HEADER_BYTES = 128
_PAGE_BYTES = 4096
_SLOTS_MIN, _SLOTS_MAX = 2, 128
_SLOTS_WANTED, _SLOTS_FEW = 16, 8  # sixteen let one pass over the state replay eight records
_RING_BYTES_MAX = 16 << 30  # a GPU spends 2 MiB of page tables on each GiB that it writes to
_SMALL_RING_BYTES = 64 << 20  # up to here more slots are cheap, and they absorb bursts
_BASE_SLICE_BYTES = 16 << 20  # a base should not crawl through slots made for a tiny adapter


class Geometry(NamedTuple):
    slots: int
    slot_bytes: int

    @property
    def bytes(self) -> int:
        return RING_HEADER_BYTES + self.slots * self.slot_bytes

    @property
    def capacity(self) -> int:
        """Bytes of payload and document together that one slot takes."""
        return self.slot_bytes - SLOT_HEADER_BYTES


def ring_geometry(
    census: Census, document_bytes: int, available_bytes: int, unmoved_bytes: int = 0
) -> Geometry:
    """Slots that each hold the largest optimizer call and a document; fewer where memory is short.
    `unmoved_bytes`: of gradients that may go with a record beside its calls. They can be cut, so that a slot
    takes them whole only where there is memory for it."""
    calls = [gradient_layout(census, i).bytes + AMP_BYTES for i in range(len(census.optimizers))]
    state_bytes = sum(atom.bytes for atom in census.atoms)
    most = min(_RING_BYTES_MAX, max(available_bytes, 0) // 4)
    payload = max(
        [*calls, min(state_bytes, _BASE_SLICE_BYTES), min(unmoved_bytes, most // _SLOTS_WANTED)]
    )
    room_for_documents = 2 * document_bytes + 64 * len(census.atoms) + (64 << 10)
    slot = align(SLOT_HEADER_BYTES + payload + room_for_documents, _PAGE_BYTES)
    wanted = min(_SLOTS_MAX, max(_SLOTS_WANTED, _SMALL_RING_BYTES // slot))
    wanted = min(wanted, max(_SLOTS_FEW, most // slot))
    affordable = (available_bytes - RING_HEADER_BYTES) // slot
    if affordable < _SLOTS_MIN:
        raise NotEnoughMemory(
            f"ring: {_SLOTS_MIN} slots of {slot / 2**20:.1f} MiB needed, "
            f"{max(available_bytes, 0) / 2**20:.1f} MiB of host memory available",
            hint="free host memory, raise the cgroup's limit, or point tuning=Tuning(arena_dir=…) at a disk",
        )
    return Geometry(int(min(wanted, affordable)), slot)


def replica_bytes(census: Census) -> int:
    """What the shadow's replica will need, guessing two optimizer slots for every moved parameter."""
    moved = {atom for spec in census.optimizers for atom in spec.atoms}
    return sum(atom.bytes * (3 if i in moved else 1) for i, atom in enumerate(census.atoms))
