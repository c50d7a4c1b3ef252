"""Dropping records must not keep anything of the user's step alive."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import status_when

import everystep
from everystep.capture.outbox import DropIfRingFull, RingFull
from everystep.core import geometry

RING_SLOTS_MAX = 128


class Large:
    """Stands for what the locals of a training step hold: logits, losses, activations."""


def test_no_frame_of_the_step_outlives_it(tmp_path: Path) -> None:
    """An exception's traceback holds frames; a cycle through it lives until the next collection (as it
    did on Python 3.12 when a generator caught it)."""
    model = torch.nn.Linear(500, 500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def turn() -> weakref.ref[Large]:
        large = Large()
        model(torch.randn(2, 500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return weakref.ref(large)

    with everystep.attach(model, optimizer, run=tmp_path / "run") as run:
        run.resume()
        turn()
        run.seal()
        pid = status_when(run, lambda told: told["warm"])["pid"]
        os.kill(pid, signal.SIGSTOP)
        gc.disable()
        try:
            alive = 0
            for _ in range(RING_SLOTS_MAX + 20):
                alive += turn()() is not None
                run.seal()
        finally:
            gc.enable()
            os.kill(pid, signal.SIGCONT)
        assert run.status()["records_dropped"] > 0
        assert alive == 0


def test_a_full_ring_is_no_error_and_leaves_no_traceback() -> None:
    dropped = []
    full = RingFull()
    with DropIfRingFull(lambda: dropped.append(True)):
        raise full
    assert dropped == [True] and full.__traceback__ is None
    with pytest.raises(ValueError, match="another"), DropIfRingFull(lambda: dropped.append(True)):
        raise ValueError("another")


def test_a_ring_of_two_slots_gets_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and a slice of a base fill it: without waiting there would never be a base."""
    for name in ("_SLOTS_WANTED", "_SLOTS_FEW"):
        monkeypatch.setattr(geometry, name, 2)
    for name in ("_SMALL_RING_BYTES", "_BASE_SLICE_BYTES"):
        monkeypatch.setattr(geometry, name, 1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with everystep.attach(model, optimizer, run=tmp_path / "run", on_failure="raise") as run:
        for step in run.steps(200):
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            if step % 20 == 19 and run.status()["shadow_step"] is not None:
                break
        assert run.status()["ring_slots"] == 2
        assert step < 100, "a base took too long"
