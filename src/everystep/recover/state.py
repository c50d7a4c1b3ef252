"""The state of a run at one step, to be looked at: what `diff` and `export` read. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from everystep.core.census import Census
from everystep.errors import StepUnavailable
from everystep.format.base import SessionValues
from everystep.store.bases import BaseReader, read_index
from everystep.store.reader import open_run


class StateTensor(NamedTuple):
    """`slot` is empty for an atom's value, else `<optimizer key>/<name>`."""

    name: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class State(NamedTuple):
    step: int
    census: Census
    session: SessionValues
    weights_only: bool
    tensors: Callable[[], Iterator[StateTensor]]


def open_state(run: Path, which: str) -> State:
    """The state at a base: a step, a tag, or `latest`. Every byte has been checked."""
    candidate = open_run(run).find(which)
    index = read_index(run, candidate)
    if index.tail_steps:
        raise StepUnavailable(
            f"step {index.step} of {run}: its last {index.tail_steps} steps are a log of gradients",
            hint="everystep.restore loads it: the optimizer given there replays them",
        )
    reader = BaseReader(run, index)

    def tensors() -> Iterator[StateTensor]:
        for t in index.tensors:
            name = index.census.atoms[t.atom].name
            yield StateTensor(name, t.slot, t.dtype, t.shape, reader.tensor(t))

    return State(index.step, index.census, reader.session, candidate.weights_only, tensors)
