"""The state of a run at one step, to be looked at: what `diff` and `export` read. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from everystep.core.census import Census
from everystep.core.tensors import Held
from everystep.errors import StepUnavailable
from everystep.format.base import SessionValues
from everystep.store.bases import BaseReader, read_base
from everystep.store.reader import open_run


class State(NamedTuple):
    step: int
    census: Census
    session: SessionValues
    weights_only: bool
    tensors: Callable[[], Iterator[Held]]

    def name(self, tensor: Held) -> str:
        """Of the atom that it belongs to."""
        return self.census.atoms[tensor.atom].name


def open_state(run: Path, which: str) -> State:
    """The state at a base: a step, a tag, or `latest`. Every byte has been checked."""
    candidate = open_run(run).find(which)
    base = read_base(run, candidate)
    if base.tail_steps:
        raise StepUnavailable(
            f"step {base.step} of {run}: its last {base.tail_steps} steps are a log of gradients",
            hint="everystep.restore loads it: the optimizer given there replays them",
        )
    reader = BaseReader(run, base)

    session, weights_only = reader.session(), candidate.weights_only
    return State(base.step, base.census, session, weights_only, reader.tensors)
