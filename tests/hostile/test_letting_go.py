"""Letting records go must not keep anything of the user's step alive."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from pathlib import Path

import torch

import everystep

RING_SLOTS_MAX = 128


class Large:
    """Stands for what the locals of a training step hold: logits, losses, activations."""


def test_no_frame_of_the_step_outlives_it(tmp_path: Path) -> None:
    """An exception's traceback holds frames; a cycle through it lives until the next collection."""
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
        deadline = time.monotonic() + 60
        while not run.status()["warm"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pid = run.status()["pid"]
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
        assert run.status()["records_let_go"] > 0
        assert alive == 0
