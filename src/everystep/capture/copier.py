"""Moves tensor bytes into the ring: at once from the CPU, on side streams from GPUs.

On a GPU the host never waits: copies are queued behind the work that made the data, the compute
stream waits on the device until they are done (so that `step()` may rewrite a gradient), and the last
operation of the side stream writes the slot's commit word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from everystep.format.slot import SLOT_DEVICE_WORD_AT, commit_word
from everystep.lane.ring import RingWriter


class Copier:
    """Owned by the training thread."""

    def __init__(self, ring: RingWriter, devices: set[torch.device]) -> None:
        self._ring = ring
        self._bytes = torch.frombuffer(ring.memory.map, dtype=torch.uint8)
        self._streams = {d: torch.cuda.Stream(d) for d in devices if d.type == "cuda"}
        self._words = {d: torch.empty(1, dtype=torch.int64, device=d) for d in self._streams}
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}
        self._registered = bool(self._streams) and _register(self._bytes)
        self._used: list[torch.device] = []

    def gradients(
        self, at: int, optimizer: int, layout: Sequence[int], grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Copy the gradients that are there to `at` plus their offsets."""
        views = self._gradient_views(at, optimizer, layout, grads)
        there = [(v, g.detach()) for v, g in zip(views, grads, strict=True) if g is not None]
        targets, sources = [v for v, _ in there], [g for _, g in there]
        if not self._streams:
            if sources:
                torch._foreach_copy_(targets, sources)
            return
        for target, source in there:
            self._copy(target, source)
        self._order()

    def _gradient_views(
        self, at: int, optimizer: int, layout: Sequence[int], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        # a slot is used again and again with the same layout: typed views of it are kept
        views = self._views.setdefault((at, optimizer), [])
        if len(views) != len(grads) or any(
            g is not None and v.shape != g.shape for v, g in zip(views, grads, strict=False)
        ):
            views[:] = [
                self._typed(at + offset, g) if g is not None else self._bytes[:0]
                for offset, g in zip(layout, grads, strict=True)
            ]
        return views

    def _typed(self, at: int, like: torch.Tensor) -> torch.Tensor:
        size = like.numel() * like.element_size()
        return self._bytes[at : at + size].view(like.dtype).view(like.shape)

    def piece(self, at: int, source: torch.Tensor, start: int, size: int) -> None:
        """Copy `size` bytes of a tensor, from byte `start` of its row-major form."""
        flat = source.detach().contiguous().view(-1).view(torch.uint8)[start : start + size]
        self._copy(self._bytes[at : at + size], flat)
        if flat.is_cuda:
            self._order()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not source.is_cuda:
            target.copy_(source)
            return
        stream = self._streams[source.device]
        if source.device not in self._used:
            stream.wait_stream(torch.cuda.current_stream(source.device))
            self._used.append(source.device)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=self._registered)

    def _order(self) -> None:
        for device in self._used:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        self._used.clear()

    def commit(self, ticket: int) -> None:
        """Say that the slot's payload is there, behind every copy queued for it."""
        if not self._streams or not self._registered:
            self._ring.commit_device(ticket)
            return
        first, *others = self._streams.items()
        device, stream = first
        for _, other in others:
            stream.wait_stream(other)
        at = self._ring.slot_at(ticket) + SLOT_DEVICE_WORD_AT
        word = commit_word(self._ring.nonce, ticket)
        signed = word - (1 << 64) if word >> 63 else word
        with torch.cuda.stream(stream):
            self._words[device].fill_(signed)
            self._bytes[at : at + 8].view(torch.int64).copy_(self._words[device], non_blocking=True)

    def close(self) -> None:
        if self._registered:
            for stream in self._streams.values():
                stream.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self._registered = False


def _register(memory: torch.Tensor) -> bool:
    """Page-lock the ring for the GPUs; where that is refused, copies wait, and stay correct."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    return int(code) == 0
