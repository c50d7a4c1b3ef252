"""`everystep tune`: from a living run, from the store alone, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import everystep
from everystep.tune.measured import Measured


def tune(*words: str | Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "everystep", "tune", *map(str, words), "--json"],
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout)


def finished(run: Path) -> Path:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    with everystep.attach(model, optimizer, run=run) as training:
        for _ in training.steps(3):
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
    return run


def test_of_a_run_that_nobody_trains(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    before = sorted(run.rglob("*"))
    code, refusal = tune(run)
    assert code == 2 and "how long a step takes" in refusal["error"] and refusal["hint"]
    picture = tmp_path / "waste.png"
    code, rare = tune(run, "--step-time", "0.2s", "--mtbf", "30d", "--plot", picture)
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert rare["sources"]["iteration_seconds"] == "given"
    assert rare["sources"]["record_bytes"] == "assumed" and rare["mtbf_why"] == "given"
    assert rare["predicted"]["overhead_percent"] <= rare["budget_percent"]
    terms = ("bases", "log", "wear", "lost", "load", "replay", "restart")
    assert abs(sum(rare["predicted"][t] for t in terms) - rare["predicted"]["total"]) < 1e-12
    assert rare["why"] and rare["others"]
    code, often = tune(run, "--step-time", "0.2s", "--mtbf", "10m")
    assert code == 0
    assert often["predicted"]["total"] > rare["predicted"]["total"], "more failures, more waste"
    assert sorted(run.rglob("*")) == before, "what was written for measuring is gone"


def test_of_a_living_run(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    with everystep.attach(model, optimizer, run=tmp_path / "run") as training:
        for step in training.steps(5000):
            model(torch.randn(2, 64)).sum().backward()
            optimizer.step()
            time.sleep(0.005)
            if step % 50 == 49 and Measured(**training.status()["measured"]).enough:
                break
        training.flush(60)
        code, found = tune(tmp_path / "run", "--mtbf", "6h")
        assert code == 0 and found["sources"] == {}, "everything was measured"
        assert found["machine"]["iteration_seconds"] >= 0.005
        assert found["machine"]["mtbf_seconds"] == 6 * 3600
        shown = subprocess.run(
            [sys.executable, "-m", "everystep", "tune", tmp_path / "run"],
            capture_output=True,
            text=True,
        )
        assert "durable_every=" in shown.stdout and shown.stderr == ""
        assert "the run has not failed yet" in shown.stdout


def test_refusals(tmp_path: Path) -> None:
    assert tune(tmp_path / "absent")[1]["kind"] == "NotARun"
    run = finished(tmp_path / "run")
    assert tune(run, "--step-time", "1s", "--mtbf", "rarely")[1]["kind"] == "OptionsError"
