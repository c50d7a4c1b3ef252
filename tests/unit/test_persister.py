"""A store that fails in whatever way: it is said, tried again after a pause, and nothing is forgotten."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_keeper import Bench

from everystep.core.retention import Rules
from everystep.errors import StoreError
from everystep.format.base import Point
from everystep.shadow import persist
from everystep.shadow.persist import Persister
from everystep.store import epoch
from everystep.store.epoch import EpochWriter
from everystep.store.layout import epoch_numbers
from everystep.store.runs import read_lineage

ERRORS = [
    OSError(errno.EIO, "Input/output error"),
    StoreError("not now"),
    RuntimeError("can't start new thread"),
    MemoryError(),
    ValueError("a fault of ours"),
]


def once(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, error: Exception) -> None:
    """The next call of it raises."""
    right = getattr(place, name)

    def fail(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(place, name, right)
        raise error

    monkeypatch.setattr(place, name, fail)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (persist, "EpochWriter"),
        (persist, "written_lately"),
        (persist, "_reached"),
        (epoch, "claim_epoch"),
        (EpochWriter, "_newest_index"),
        (EpochWriter, "_measure"),
    ],
)
def test_an_epoch_is_claimed_as_a_whole_or_tried_again(
    place: Any, name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    first = Bench(run)
    first.keeper.persist_if_due(asked=True, last_words=False, moving=False)
    first.persister.wait()
    persister = Persister(run, Point(1, 1), Rules())
    once(monkeypatch, place, name, error)
    persister.claim()
    persister.wait()
    state = persister.state
    assert state.epoch == 0 and state.problem and state.failures == 1 and not persister.may_try
    persister.claim()
    persister.wait()
    state = persister.state
    assert state.epoch == max(epoch_numbers(run)) and state.reached == 1 and not state.problem
    if place is persist:
        assert state.epoch <= 2, "what was claimed is kept"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_whatever_ends_a_write_is_told_and_tried_again_later(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "run")
    once(monkeypatch, epoch, "write_base", error)
    bench.keeper.persist_if_due(asked=True, last_words=False, moving=False)
    bench.persister.wait()
    state = bench.persister.state
    assert state.failures == 1 and state.problem and state.retry_at > time.monotonic()
    assert not bench.persister.may_try, "not in a hot loop"
    bench.keeper.persist_if_due(asked=True, last_words=False, moving=False)
    bench.persister.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [1]
    assert not bench.persister.state.problem


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_a_thread_that_cannot_be_started_is_a_store_that_fails(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "run")
    once(monkeypatch, threading.Thread, "start", error)
    bench.keeper.persist_if_due(asked=True, last_words=False, moving=False)
    assert bench.persister.state.failures == 1 and not bench.keeper.holds_still
    now = time.monotonic_ns()
    assert not bench.persister.spans.meet(now, now + 1)
    bench.keeper.persist_if_due(asked=True, last_words=False, moving=False)
    bench.persister.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [1]
