"""A store that fails in whatever way: it is said, tried again after a pause, and nothing is forgotten."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_base_scheduler import Bench

from everystep.core.retention import Rules
from everystep.errors import StoreError
from everystep.format.base import Point
from everystep.shadow import base_writer as writing
from everystep.shadow.base_writer import BaseWriter
from everystep.store import term
from everystep.store.layout import term_numbers
from everystep.store.runs import read_lineage
from everystep.store.term import TermWriter

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
        (writing, "TermWriter"),
        (writing, "written_lately"),
        (writing, "_reached"),
        (term, "claim_term"),
        (TermWriter, "_newest_base"),
        (TermWriter, "_measure"),
    ],
)
def test_a_term_is_claimed_as_a_whole_or_tried_again(
    place: Any, name: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    first = Bench(run)
    first.base_scheduler.persist_if_due(asked=True, last_words=False, moving=False)
    first.base_writer.wait()
    base_writer = BaseWriter(run, Point(1, 1), Rules())
    once(monkeypatch, place, name, error)
    base_writer.claim()
    base_writer.wait()
    state, trouble = base_writer.state, base_writer.trouble
    assert state.term == 0 and trouble.problem and trouble.failures == 1
    assert not base_writer.may_begin
    base_writer.claim()
    base_writer.wait()
    state = base_writer.state
    assert state.term == max(term_numbers(run)) and state.reached == 1
    assert not base_writer.trouble.problem
    if place is writing:
        assert state.term <= 2, "what was claimed is kept"


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_whatever_ends_a_write_is_told_and_tried_again_later(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "run")
    once(monkeypatch, term, "write_base", error)
    bench.base_scheduler.persist_if_due(asked=True, last_words=False, moving=False)
    bench.base_writer.wait()
    trouble = bench.base_writer.trouble
    assert trouble.failures == 1 and trouble.problem and trouble.retry_at > time.monotonic()
    assert not bench.base_writer.may_begin, "not in a hot loop"
    bench.base_scheduler.persist_if_due(asked=True, last_words=False, moving=False)
    bench.base_writer.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [1]
    assert not bench.base_writer.trouble.problem


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()], ids=repr)
def test_a_thread_that_cannot_be_started_is_a_store_that_fails(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "run")
    once(monkeypatch, threading.Thread, "start", error)
    bench.base_scheduler.persist_if_due(asked=True, last_words=False, moving=False)
    assert bench.base_writer.trouble.failures == 1 and not bench.base_scheduler.holds_still
    now = time.monotonic_ns()
    assert not bench.base_writer.spans.meet(now, now + 1)
    bench.base_scheduler.persist_if_due(asked=True, last_words=False, moving=False)
    bench.base_writer.wait()
    assert [c.entry.step for c in read_lineage(tmp_path / "run").candidates] == [1]
