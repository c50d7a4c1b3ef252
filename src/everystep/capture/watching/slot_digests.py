"""Digests of optimizer slots and weights on the CPU: writes through `.data` leave no other trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import xxhash

from everystep.capture.census import LiveCensus
from everystep.replay.tensors import raw_bytes


class Digests:
    """Of some tensors' memory. Owned by the training thread. Valid as long as they are the same objects at
    the same addresses, which whoever watches sees at every look. Of what is larger than `bytes_now()`, only
    a part is known after each mark, in turn."""

    def __init__(
        self, find: Callable[[], Iterable[tuple[int, torch.Tensor]]], bytes_now: Callable[[], int]
    ) -> None:
        self._find, self._bytes_now = find, bytes_now
        self._views: list[tuple[int, memoryview]] = []
        self._memory = ByteViews()
        self._marked: list[tuple[int, memoryview]] = []  # the part whose turn it is
        self._digests: list[int] = []
        self._next, self._at = 0, 0  # view and byte where the next part begins

    @property
    def is_whole(self) -> bool:
        return self._marked is self._views

    def mark(self, *, replaced: bool) -> None:
        """All is known as it is now. `replaced`: they may be other tensors than before."""
        if replaced:
            self._memory.turn()
            self._views = [(atom, self._memory.of(tensor)) for atom, tensor in self._find()]
        self._marked = self._part()
        self._digests = self._now()

    def edited(self) -> list[int]:
        """Atoms whose bytes were written since the last mark; they are marked again."""
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
        left = self._bytes_now()
        if sum(view.nbytes for _, view in self._views) <= left:
            return self._views
        part: list[tuple[int, memoryview]] = []
        while left > 0:
            atom, view = self._views[self._next % len(self._views)]
            piece = view[self._at : self._at + left]
            part.append((atom, piece))
            left -= piece.nbytes
            self._at += piece.nbytes
            if self._at >= view.nbytes:
                self._next, self._at = (self._next + 1) % len(self._views), 0
        return part


def digests_of_slots(live: LiveCensus, index: int, bytes_now: Callable[[], int]) -> Digests:
    """Of one optimizer."""

    def find() -> Iterable[tuple[int, torch.Tensor]]:
        for atom in live.census.optimizers[index].atoms:
            for value in live.state_of(index, atom).values():
                if _is_plain(value):
                    yield atom, value

    return Digests(find, bytes_now)


def digests_of_values(
    live: LiveCensus, atoms: Iterable[int], bytes_now: Callable[[], int]
) -> Digests:
    """Of atoms that are on the CPU."""
    chosen = list(atoms)
    return Digests(
        lambda: ((a, live.tensors[a]) for a in chosen if live.tensors[a].is_cpu), bytes_now
    )


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
        """What nobody asks for until the next turn is dropped: a view keeps memory alive."""
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
