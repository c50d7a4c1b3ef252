"""A file system that does not answer: the shadow goes on taking records in, and training does not notice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from waiting import wait_until

import everystep

from .jobs import Job

HANGING = """
import os, time
from everystep.shadow import base_writer as writing

def hanging(right):
    def call(*args, **options):
        while os.path.exists({file!r}):
            time.sleep(0.05)
        return right(*args, **options)
    return call

writing.what_is_lost = hanging(writing.what_is_lost)
writing.TermWriter = hanging(writing.TermWriter)
"""


@pytest.mark.parametrize("when", ["from the start", "later"])
def test_replay_goes_on(
    when: str, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "hangs"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HANGING.format(file=str(hangs)))
    monkeypatch.syspath_prepend(tmp_path / "site")  # the shadow's as well
    if when == "from the start":
        hangs.touch()
    job = Job("adamw")
    options = {"run": tmp_path / "run", "state": job.state, "durable_every": "1h"}
    with everystep.attach(job.model, job.optimizer, every=1, **options, on_lag="wait") as run:
        if when == "later":
            for _ in run.steps(3):
                job.step()
            run.flush()
            hangs.touch()
            time.sleep(1.5)  # it looks once a second
        slots = run.status()["ring_slots"]
        began, slowest = time.monotonic(), 0.0
        for _ in run.steps(run.step + slots + 50):
            job.step()
            now = time.monotonic()
            slowest, began = max(slowest, now - began), now
        assert slowest < 10, f"a step took {slowest:.1f} s"
        last = run.step
        wait_until(lambda: run.status()["replayed_step"] == last, "all to be replayed")
        assert run.status()["durable_step"] == (3 if when == "later" else None)
        hangs.unlink()
        run.flush()
        assert run.status()["durable_step"] == last
