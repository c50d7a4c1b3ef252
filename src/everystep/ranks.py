"""Compares what every rank of a job holds a copy of: a rank that disagrees with the others is named.

Chips that compute wrongly without saying so show in weights that should be equal and are not. Every few steps
each rank digests its parameters and optimizer slots where they lie; the digests, a few bytes a tensor, are
gathered beside training and looked at when they are there.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from everystep.capture.census import LiveCensus, Models, Optimizers, take_census
from everystep.capture.watching.fingerprints import by_device
from everystep.errors import SilentCorruption, UsageError
from everystep.replay.fingerprints import digest_tensors

log = logging.getLogger("everystep")

_SHOWN = 3
Key = tuple[int, str]


class Disagreement(NamedTuple):
    """`rank` is None where there is no majority: then nobody can say which of them is wrong."""

    step: int
    rank: int | None
    atom: str
    slot: str

    def __str__(self) -> str:
        who = "ranks disagree without a majority" if self.rank is None else f"rank {self.rank}"
        return f"{who}: {self.atom}{f' ({self.slot})' if self.slot else ''} at step {self.step}"


def compare_ranks(
    model: Models,
    optimizer: Optimizers,
    *,
    every: int = 64,
    on_mismatch: Literal["warn", "raise"] = "warn",
) -> RankWatch:
    """Watch parameters and optimizer state that all ranks hold copies of, as under DDP. Called by every
    rank, with the same arguments; what differs already is taken to be nobody's copy."""
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "compare_ranks: there is no process group", hint="call init_process_group first"
        )
    if every < 1:
        raise UsageError(f"compare_ranks: every={every}, expected >= 1")
    return RankWatch(take_census(model, optimizer), every, on_mismatch)


class RankWatch:
    """Owned by the training thread. Counts the steps of the first optimizer."""

    def __init__(self, live: LiveCensus, every: int, on_mismatch: str) -> None:
        self._live = live
        self._every = every
        self._raises = on_mismatch == "raise"
        self._group = dist.new_group(
            backend="gloo"
        )  # of its own: training's traffic is not disturbed
        self.step = 0
        self.compared = 0
        self.found: list[Disagreement] = []
        self._reading: _Reading | None = None
        self._gathering: _Gathering | None = None
        different = self._differing(_gather(self._read(), self._group))
        self.not_replicated = sorted({self._live.census.atoms[k[0]].name for k, _ in different})
        self._ignored = {atom for (atom, _), _ in different}
        self._hook: Any = live.optimizers[0].register_step_post_hook(lambda *_: self._after_step())

    def close(self) -> None:
        """Look at what is still on its way; every rank calls it."""
        self._hook.remove()
        self._finish()

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # others may not come this far
            self._hook.remove()

    def _after_step(self) -> None:
        self.step += 1
        if self._reading is not None and self._reading.arrived:
            self._exchange(self._reading)
        if self._gathering is not None and self._gathering.work.is_completed() and not self._raises:
            self._look(self._gathering)
        if self._raises and self.step % self._every == 1 % self._every:
            self._finish()  # all ranks at the same step: who went on would wait for the others for ever
        if self.step % self._every == 0:
            self._finish()  # normally long done; every rank must gather equally often
            self._reading = self._read()

    def _finish(self) -> None:
        if self._reading is not None:
            self._exchange(self._reading)
        if self._gathering is not None:
            self._look(self._gathering)

    def _exchange(self, reading: _Reading) -> None:
        self._reading, self._gathering = None, _gather(reading, self._group)

    def _look(self, gathering: _Gathering) -> None:
        self._gathering = None
        self.compared += 1
        new = []
        for (atom, slot), numbers in self._differing(gathering):
            if atom not in self._ignored:
                name = self._live.census.atoms[atom].name
                new += [
                    Disagreement(gathering.step, rank, name, slot)
                    for rank in outlier_ranks(numbers)
                ]
                self._ignored.add(atom)  # it stays wrong, and is told once
        if new:
            self._tell(new)

    def _tell(self, new: list[Disagreement]) -> None:
        self.found += new
        said = "; ".join(map(str, new[:_SHOWN]))
        more = f" and {len(new) - _SHOWN} more" if len(new) > _SHOWN else ""
        text = f"copies that should be equal are not: {said}{more}"
        log.error("silent_corruption %s", text)
        if self._raises:
            raise SilentCorruption(
                text, hint="take the job back to a step before, without that rank's chip"
            )
        warnings.warn(f"everystep: {text}", stacklevel=4)

    def _read(self) -> _Reading:
        """Digests of what moves, on their way to the host."""
        specs = self._live.census.optimizers
        atoms = {atom: None for spec in specs for atom in spec.atoms}
        found = by_device(self._live, list(atoms), range(len(specs)))
        keys: list[Key] = []
        parts = []
        for own in found.values():
            keys += own
            parts.append(digest_tensors(list(own.values())))
        return _Reading(self.step, keys, parts)

    def _differing(self, gathering: _Gathering) -> list[tuple[Key, list[int]]]:
        gathering.work.wait()
        rows = [row.tolist() for row in gathering.rows]
        columns = [list(numbers) for numbers in zip(*rows, strict=True)]
        pairs = zip(gathering.keys, columns, strict=True)
        return [(key, numbers) for key, numbers in pairs if len(set(numbers)) > 1]


class _Reading:
    """Digests that a device may still be computing."""

    def __init__(self, step: int, keys: list[Key], parts: list[torch.Tensor]) -> None:
        self.step, self.keys = step, keys
        devices = {part.device for part in parts if part.device.type == "cuda"}
        cuda = bool(devices)
        self._host = torch.empty(len(keys), dtype=torch.int64, pin_memory=cuda)
        at = 0
        for part in parts:
            self._host[at : at + len(part)].copy_(part, non_blocking=cuda)
            at += len(part)
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    @property
    def arrived(self) -> bool:
        return all(event.query() for event in self._events)

    def numbers(self) -> torch.Tensor:
        for event in self._events:
            event.synchronize()
        return self._host


class _Gathering(NamedTuple):
    step: int
    keys: list[Key]
    rows: list[torch.Tensor]
    work: Any


def _gather(reading: _Reading, group: Any) -> _Gathering:
    mine = reading.numbers()
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(rows, mine, group=group, async_op=True)
    return _Gathering(reading.step, reading.keys, rows, work)


def outlier_ranks(numbers: Sequence[int]) -> list[int | None]:
    """Ranks whose number is not the one that most of them have."""
    (usual, count), *_ = Counter(numbers).most_common()
    if 2 * count <= len(numbers):
        return [None]
    return [rank for rank, number in enumerate(numbers) if number != usual]
