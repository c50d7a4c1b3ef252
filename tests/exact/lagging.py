"""A device whose side stream lags as far as it may: what was queued runs when somebody waits for it,
or by chance. Computation runs at once, so a copy that nobody waits for sees what came later."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from everystep.capture.copying import copier
from everystep.device.copy_stream import STAGING_BYTES
from everystep.link import Link


class LaggingSide:
    """Stands for a GPU, on the CPU."""

    stall_seconds = 0.0
    link_bytes_per_second = 0.0
    window_seconds = 0.0
    digest_seconds = 0.0
    is_idle = False
    allocated_bytes = 0
    peak_bytes = 1 << 40

    def __init__(self, seed: int, eagerness: float) -> None:
        self._chance = random.Random(seed)
        self._eagerness = eagerness
        self._queue: deque[Callable[[], None]] = deque()
        self._queued = self._done = 0
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
        self.waits = 0
        self.packing_pays = seed % 2 == 0

    def follow(self) -> None:
        self._run_some()

    def staging(self) -> torch.Tensor:
        return self._staging

    def pack(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.offload(targets, sources)

    def offload(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        assert targets, "torch refuses an empty list"
        for target, source in zip(targets, sources, strict=True):
            self._push(lambda t=target, s=source: t.copy_(s))

    def host_like(self, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(value)

    def wait_for(self, mark: int) -> None:
        raise AssertionError("there is one device only")

    def mark(self) -> int:
        return self._queued

    def passed(self, mark: int) -> bool:
        self._run_some()
        return self._done >= mark

    def wait_for_copy(self, mark: int) -> None:
        self.waits += self._done < mark
        while self._done < mark:
            self._run_one()

    def write_word(self, target: torch.Tensor, word: int) -> None:
        signed = word - (1 << 64) if word >> 63 else word
        self._push(lambda: target.view(torch.int64).fill_(signed))

    def digest(self, work: Callable[[], None]) -> None:
        work()

    def open_window(self) -> None:
        pass

    def close_window(self) -> None:
        pass

    def close(self) -> None:
        while self._queue:
            self._run_one()

    def _push(self, work: Callable[[], Any]) -> None:
        self._queue.append(work)
        self._queued += 1
        self._run_some()

    def _run_some(self) -> None:
        while self._queue and self._chance.random() < self._eagerness:
            self._run_one()

    def _run_one(self) -> None:
        with torch.no_grad():
            self._queue.popleft()()
        self._done += 1


def use_lagging_sides(monkeypatch: Any, seed: int, eagerness: float) -> list[LaggingSide]:
    """Every copier made from here on has one; returns them as they are made."""
    made: list[LaggingSide] = []

    def open_sides(memory: torch.Tensor, devices: Any) -> dict[torch.device, LaggingSide]:
        made.append(LaggingSide(seed + len(made), eagerness))
        return {torch.device("cpu"): made[-1]}

    asked = Link.ask

    def ask(self: Link, *args: Any) -> Any:
        for side in made:  # while the host waits, a device goes on working
            side.close()
        return asked(self, *args)

    monkeypatch.setattr(copier, "open_sides", open_sides)
    monkeypatch.setattr(Link, "ask", ask)
    return made
