"""The first bad step is found, by every metric, whatever the step at which things went wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep.errors import UsageError
from everystep.store.bisect import first_bad_step, metric_of

STEPS = 12


def train(path: Path, bad_from: int, value: float, dtype: torch.dtype = torch.float32) -> None:
    model = nn.Linear(3, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with everystep.attach(
        model, optimizer, run=path, keep=everystep.Keep(last=100), on_failure="raise"
    ) as run:
        for step in run.steps(STEPS):
            model(torch.ones(1, 3, dtype=dtype)).sum().backward()
            optimizer.step()
            if step + 1 >= bad_from:
                with torch.no_grad():
                    model.weight[0, 0] = value
            run.flush() if step else None


def explodes(tensors: dict[str, Any]) -> bool:
    return bool(np.abs(tensors["weight"]).max() > 1e3)


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("nonfinite", float("nan")),
        ("nonfinite", float("-inf")),
        ("max-abs=100", 1e4),
        ("norm=100", 1e4),
        ("norm=100", float("nan")),
        (f"{__name__}:explodes", 1e4),
    ],
)
def test_the_first_bad_step(
    metric: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run", 7, value)
    stored = everystep.open_run(tmp_path / "run")
    found = first_bad_step(stored, metric_of(metric))
    bad = [step for step in stored.steps if step >= 7]
    good = [step for step in stored.steps if step < 7]
    assert (found.bad, found.good) == (bad[0], good[-1])
    assert found.why and len(found.looked_at) <= 5


def test_nothing_wrong_everything_wrong_and_narrow_types(tmp_path: Path) -> None:
    train(tmp_path / "well", STEPS + 5, 0.0)
    found = first_bad_step(everystep.open_run(tmp_path / "well"), metric_of("nonfinite"))
    assert (found.bad, found.good) == (None, STEPS)
    train(tmp_path / "ill", 0, float("inf"), torch.bfloat16)
    stored = everystep.open_run(tmp_path / "ill")
    found = first_bad_step(stored, metric_of("nonfinite"))
    assert (found.bad, found.good) == (stored.steps[0], None) or stored.steps[0] == 0
    command = [sys.executable, "-m", "everystep", "bisect", str(tmp_path / "ill"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and json.loads(done.stdout)["bad"] == found.bad


@pytest.mark.parametrize("words", ["", "norm", "norm=x", "nosuch:thing", "everystep:nothing"])
def test_bad_metrics_are_refused(words: str) -> None:
    with pytest.raises(UsageError):
        metric_of(words)
