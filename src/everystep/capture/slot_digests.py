"""Digests of optimizer slots on the CPU: writes through `.data` leave no other trace."""

from __future__ import annotations

import torch
import xxhash

from everystep.capture.census import LiveCensus
from everystep.replay.tensors import raw_bytes

_BYTES_PER_STEP = 16 << 20  # of an optimizer with more, a part after each step, in turn


class SlotDigests:
    """Of one optimizer. Owned by the training thread. Valid as long as the slots are the same objects at the
    same addresses, which the watch sees at every look."""

    def __init__(self, live: LiveCensus, index: int) -> None:
        self._live, self._index = live, index
        self._views: list[tuple[int, memoryview]] = []
        self._memory = ByteViews()
        self._marked: list[tuple[int, memoryview]] = []  # the part whose turn it is
        self._digests: list[int] = []
        self._next = 0

    def mark(self, *, anew: bool) -> None:
        """The slots are known as they are now. `anew`: they may be other tensors than before."""
        if anew:
            self._views = self._look()
        self._marked = self._part()
        self._digests = self._now()

    def edited(self) -> list[int]:
        """Atoms whose slots were written since the last mark; they are marked anew."""
        now = self._now()
        if now == self._digests:
            return []
        rows = zip(self._marked, self._digests, now, strict=True)
        found = dict.fromkeys(atom for (atom, _), before, after in rows if before != after)
        self._digests = now
        return list(found)

    def differ(self) -> bool:
        return self._now() != self._digests

    def _now(self) -> list[int]:
        return [xxhash.xxh3_64_intdigest(view) for _, view in self._marked]

    def _part(self) -> list[tuple[int, memoryview]]:
        if sum(view.nbytes for _, view in self._views) <= _BYTES_PER_STEP:
            return self._views
        part: list[tuple[int, memoryview]] = []
        left = _BYTES_PER_STEP
        while left > 0 and len(part) < len(self._views):
            self._next = (self._next + 1) % len(self._views)
            part.append(self._views[self._next])
            left -= part[-1][1].nbytes
        return part

    def _look(self) -> list[tuple[int, memoryview]]:
        self._memory.turn()
        return [
            (atom, self._memory.of(value))
            for atom in self._live.census.optimizers[self._index].atoms
            for value in self._live.state_of(self._index, atom).values()
            if _is_plain(value)
        ]


def _is_plain(value: object) -> bool:
    """Whether its bytes can be looked at where they lie."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


class ByteViews:
    """Views of tensors' memory. Making one takes far longer than finding it again, and most tensors stay
    where they are."""

    def __init__(self) -> None:
        self._before: dict[object, memoryview] = {}
        self._now: dict[object, memoryview] = {}

    def turn(self) -> None:
        """What nobody asks for until the next turn is let go: a view keeps memory alive."""
        self._before, self._now = self._now, {}

    def of(self, tensor: torch.Tensor) -> memoryview:
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        found = self._before.get(place)
        view = self._now[place] = _memory(tensor) if found is None else found
        return view


def _memory(tensor: torch.Tensor) -> memoryview:
    """From its first element to its last, where they lie: a slot has the strides of its parameter."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return raw_bytes(tensor.detach().as_strided((span,), (1,)))
