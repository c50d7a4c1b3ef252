"""How a record's payloads are written to the log: as their words that are not zero, as compressed byte
planes, or as they are. What is read back is the same in every bit an event speaks of."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from everystep.core.census import Census
from everystep.core.dtypes import ELEMENT_TYPES
from everystep.core.events import Edit, Event
from everystep.core.pace import planes_pay, smoothed
from everystep.format.entry import frame_head
from everystep.format.planes import CHUNK_BYTES, can_pack, pack_chunk, pack_planes
from everystep.format.slot import pack_events
from everystep.lane.memory import COPY_THREADS, copy, fresh
from everystep.lane.sparse import pack_sparse

_LOOK_EVERY = 32  # payloads; gradients do not change their kind from one step to the next

Entries = Sequence[tuple[list[Event], memoryview]]


class LogCodec:
    """Owned by the shadow's main thread."""

    def __init__(self, census: Census) -> None:
        self._census = census
        sizes: Counter[int] = Counter()
        for atom in census.atoms:
            sizes[ELEMENT_TYPES[atom.dtype].bytes] += atom.bytes
        self._width = max(sizes, key=sizes.__getitem__, default=4)
        self._looked = 0
        self._planes = False
        self._step_seconds, self._framed_at = 0.0, 0.0
        self.how = "as it is"
        self.ratio = 1.0  # of the newest payloads to what was written of them; never 0

    def framed(self, entries: Entries) -> memoryview:
        """A record's entries as a log tail has them, in memory of their own. Atoms that only bases keep are
        left out."""
        self._keep_time()
        heads: list[bytes] = []
        parts: list[list[memoryview]] = []
        for events, payload in entries:
            kept = [e for e in events if not self._is_left_out(e)]
            first, stored = self._packed(kept, payload)
            size = sum(map(len, stored))
            heads.append(frame_head(*pack_events([*first, *kept]), size))
            parts.append(stored)
        total = sum(len(part) for stored in parts for part in stored)
        if (
            total
        ):  # a turn without an optimizer call has no payload, which says nothing of the next one
            self.ratio = sum(len(payload) for _, payload in entries) / total
        return _joined(heads, parts, total)

    def _is_left_out(self, event: Event) -> bool:
        return isinstance(event, Edit) and self._census.atoms[event.atom].lossy

    def _packed(
        self, events: list[Event], payload: memoryview
    ) -> tuple[list[Event], list[memoryview]]:
        if sparse := pack_sparse(events, payload, self._census):
            self.how = "words that are not zero"
            return [sparse[0]], [sparse[1]]
        if self._planes_pay(payload):
            self.how = "byte planes, zstd"
            planes, chunks = pack_planes(payload, self._width, COPY_THREADS)
            return [planes], [memoryview(chunk) for chunk in chunks]
        self.how = "as it is" if len(payload) >= CHUNK_BYTES else self.how
        return [], [payload]

    def _planes_pay(self, payload: memoryview) -> bool:
        """Now and then a chunk from the middle is tried."""
        if not can_pack() or len(payload) < CHUNK_BYTES // 4:
            return False
        if self._looked % _LOOK_EVERY == 0:
            middle = max(0, len(payload) // 2 // 64 * 64 - CHUNK_BYTES // 2)
            sample = payload[middle : middle + CHUNK_BYTES]
            began = time.perf_counter()
            packed = pack_chunk(sample, self._width)
            seconds = time.perf_counter() - began
            self._planes = planes_pay(
                len(sample) / len(packed),
                pack_seconds=seconds * len(payload) / len(sample) / COPY_THREADS,
                step_seconds=self._step_seconds,
            )
        self._looked += 1
        return self._planes

    def _keep_time(self) -> None:
        now = time.perf_counter()
        if self._framed_at:
            self._step_seconds = smoothed(self._step_seconds, now - self._framed_at)
        self._framed_at = now


def _joined(heads: list[bytes], parts: list[list[memoryview]], total: int) -> memoryview:
    room, at = fresh(sum(map(len, heads)) + total), 0
    targets, sources = [], []
    for head, stored in zip(heads, parts, strict=True):
        room[at : at + len(head)] = head
        at += len(head)
        for part in stored:
            targets.append(room[at : at + len(part)])
            sources.append(part)
            at += len(part)
    copy(targets, sources)
    return room
