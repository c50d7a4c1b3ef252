"""A turn whose inner loop is left by an exception of the iterator that it asks: half of it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn, ones, optim

import everystep

from .compare import same
from .harness import Job, look, unbroken
from .test_loops import simple, started


def raises(error: Any) -> Iterator[int]:
    """What an inner loop asks: a loader that Ctrl-C meets while it waits, or whose worker dies."""
    yield 0
    if error is not None:
        raise error


def train_in_halves(job: Job, run: everystep.Run, fails_at: int, error: Any) -> None:
    for step in run.steps(6):
        job.turn(step)
        for _ in raises(error if step == fails_at else None):
            pass
        job.turn(step)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_turn_that_an_inner_iterator_left_is_taken_back(tmp_path: Path, error: Any) -> None:
    end, _, _ = unbroken(simple, 12)
    job, attached = started(tmp_path / "run")
    with attached as run:
        for fails_at in (2, 4, 9):
            with contextlib.suppress(error):
                train_in_halves(job, run, fails_at, error)
        same(end, look(job), "end")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_close_does_not_seal_a_turn_that_an_inner_iterator_left(tmp_path: Path, error: Any) -> None:
    end, _, _ = unbroken(simple, 12)
    for fails_at in (2, 4, 9):
        job, run = started(tmp_path / "run")
        try:
            with contextlib.suppress(error):
                train_in_halves(job, run, fails_at, error)
        finally:
            seen = look(job)
            run.close()
        assert everystep.open_run(tmp_path / "run").steps[-1] == min(fails_at, 6)
    same(end, seen, "end")


@pytest.mark.parametrize("how", ["raise", "break", "inside"])
def test_a_kept_iterator_shows_nothing_of_how_its_loop_was_left(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half a turn had been sealed. Who closes from within the loop says that the step is done."""
    model = nn.Linear(4, 3)
    optimizer = optim.Adam(model.parameters())
    run = everystep.attach(model, optimizer, run=tmp_path / "run", every=1)
    kept = run.steps(5)
    try:
        for step in kept:
            model(ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 2 and how == "inside":
                run.close()
                break
            if step == 2 and how == "break":
                break
            if step == 2:
                raise RuntimeError("broken")
    except RuntimeError:
        pass
    if how != "inside":
        run.close()
    assert everystep.open_run(tmp_path / "run").bases[0].entry.step == (3 if how == "inside" else 2)
    assert ("is not sealed" in caplog.text) == (how != "inside")


def test_a_kept_iterator_that_is_begun_again_takes_its_turn_back(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = optim.Adam(model.parameters())
    with everystep.attach(model, optimizer, run=tmp_path / "run", every=1) as run:
        kept, seen = run.steps(5), []
        for _ in range(2):
            for step in kept:
                seen.append(step)
                model(ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if seen == [0, 1, 2]:
                    break
    assert seen == [0, 1, 2, 2, 3, 4] and optimizer.state_dict()["state"][0]["step"] == 5
