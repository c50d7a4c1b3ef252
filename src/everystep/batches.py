"""`everystep.data`: batches of a loader, data epoch after data epoch, with a place to come back to.

A plain DataLoader cannot tell its place. But its order is decided when a data epoch begins, by random states
and by generators of its own. Those are remembered: a resume begins the data epoch again with them, and skips
the batches that were seen.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Self, TypeVar

import torch
from torch.utils.data import IterableDataset

from everystep.capture.rng import capture_rng, restore_rng
from everystep.capture.state import has_state
from everystep.console import announce
from everystep.errors import UsageError

_T = TypeVar("_T")


def data(loader: Iterable[_T]) -> Batches[_T]:
    """Batches of `loader` without end, one data epoch after the other: draw them with `next`.

    Give the result to attach, in `state`: a resumed run goes on with the very next batch, in the same order.
    To get there, it loads the batches of the interrupted data epoch that were seen, and throws them away.
    torchdata's StatefulDataLoader does not need that. A sampler's `set_epoch` is called.
    A sampler that draws from global random states in the middle of a data epoch is not reproduced. A batch
    that was drawn ahead and is kept outside of `state` counts as seen: put whatever holds it into `state`.
    """
    return Batches(loader)


class Batches(Generic[_T]):
    """Owned by the training thread. `epoch` is the data epoch of the newest batch, `batch` how many of its
    batches were given."""

    def __init__(self, loader: Iterable[_T]) -> None:
        if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
            raise UsageError(
                f"everystep.data: cannot go through a {type(loader).__name__} more than once",
                hint="give the loader itself, not iter(loader)",
            )
        self.loader = loader
        self.epoch = self.batch = 0
        self._running: Iterator[_T] | None = None
        self._generators = _generators_of(loader)
        self._random = b""  # random states when the data epoch began; none: it has not
        self._drawn: list[bytes] = []  # the same of generators
        self._stored: Any = None  # the place that a stateful loader is to go on from

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _T:
        if self._running is None:
            self._running = self._begin_again() if self._random else self._begin()
        before = capture_rng() if self.batch == 1 and self._draws_in_order() else b""
        for batch in self._running:
            self.batch += 1
            if before and capture_rng() != before:
                warnings.warn(_DRAWS, stacklevel=2)
            return batch
        if not self.batch:
            raise UsageError(f"everystep.data: the loader has no batch in data epoch {self.epoch}")
        self.epoch, self.batch = self.epoch + 1, 0
        self._running, self._random = None, b""
        return next(self)

    def _begin(self) -> Iterator[_T]:
        random, drawn = capture_rng(), self._generator_states()
        _set_epoch(self.loader, self.epoch)
        running = iter(self.loader)
        self._random, self._drawn = random, drawn
        return running

    def _begin_again(self) -> Iterator[_T]:
        """The data epoch that was interrupted, up to the place where it was."""
        started, now = time.perf_counter(), capture_rng()
        try:
            restore_rng(self._random)
            self._set_generators()
            _set_epoch(self.loader, self.epoch)
            if self._stored is not None:
                self.loader.load_state_dict(self._stored)  # type: ignore[attr-defined]
                return iter(self.loader)
            running = iter(self.loader)
            skipped = sum(1 for _ in zip(range(self.batch), running, strict=False))
        finally:
            restore_rng(now)
        if skipped < self.batch:
            raise UsageError(
                f"everystep.data: data epoch {self.epoch} has {skipped} batches, the run was at {self.batch}",
                hint="build the loader as it was: the same data, batch size and sampler",
            )
        announce(
            f"skipped {skipped} batches of data epoch {self.epoch} in "
            f"{time.perf_counter() - started:.1f} s (torchdata's StatefulDataLoader need not)"
        )
        if self.epoch and getattr(self.loader, "persistent_workers", False):
            warnings.warn(_PERSISTENT, stacklevel=3)
        return running

    def _draws_in_order(self) -> bool:
        """Whether drawing random numbers may decide which sample comes next."""
        iterable = isinstance(getattr(self.loader, "dataset", None), IterableDataset)
        return iterable and not has_state(self.loader) and not self.loader.num_workers  # type: ignore[attr-defined]

    def _generator_states(self) -> list[bytes]:
        return [generator.get_state().numpy().tobytes() for generator in self._generators]

    def _set_generators(self) -> None:
        for generator, state in zip(self._generators, self._drawn, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def state_dict(self) -> dict[str, Any]:
        begun = bool(self._random)
        stateful = self._running is not None and has_state(self.loader)
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "random": self._random,
            "generators": self._drawn if begun else self._generator_states(),
            "loader": self.loader.state_dict() if stateful else self._stored,  # type: ignore[attr-defined]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The iterator is made when the next batch is drawn, because making one draws random numbers."""
        if len(state["generators"]) != len(self._generators):
            raise UsageError(
                f"everystep.data: the loader and its samplers have {len(self._generators)} generators, "
                f"in the run they had {len(state['generators'])}",
                hint="build the loader as it was",
            )
        self.epoch, self.batch = state["epoch"], state["batch"]
        self._random, self._drawn = state["random"], state["generators"]
        self._stored, self._running = state["loader"], None
        self._set_generators()


_DRAWS = (
    "everystep.data: this IterableDataset draws from the global random states between the draws of training: "
    "a resume in the middle of a data epoch may see another order. Use num_workers=1 or more, or torchdata's "
    "StatefulDataLoader"
)
_PERSISTENT = (
    "everystep.data: with persistent_workers=True, workers keep random states over data epochs. These are "
    "not restored: the order of samples is the same, random augmentations may differ"
)


def _generators_of(loader: Any) -> list[torch.Generator]:
    """Of the loader and its samplers, each once."""
    owners = [loader]
    for name in ("sampler", "batch_sampler"):
        owners.append(getattr(loader, name, None))
        owners.append(getattr(owners[-1], "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _set_epoch(loader: Any, epoch: int) -> None:
    """As loops over data epochs do by hand; a loader that can passes it on by itself."""
    parts = [getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")]
    for part in [loader] if hasattr(loader, "set_epoch") else parts:
        getattr(part, "set_epoch", lambda _: None)(epoch)
