"""A CUDA trainer, killed with kill -9 and resumed, goes on bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = Path(__file__).with_name("cuda_trainer.py")
STEPS = 24


def train(run: Path | None, kind: str, die_at: int = -1) -> dict[str, object] | None:
    """Run the trainer; None if it was killed."""
    job = json.dumps(
        {"run": str(run) if run else "", "kind": kind, "steps": STEPS, "die_at": die_at}
    )
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), job], capture_output=True, text=True, env=environment
    )
    if die_at >= 0:
        assert done.returncode == -9, done.stderr
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "kind", ["sgd", "adam", "adam-fused", "adamw", "adamw-fused", "adamw-scaler", "muon"]
)
def test_killed_cuda_trainer_comes_back(tmp_path: Path, kind: str) -> None:
    reference = train(None, kind)
    train(tmp_path / "run", kind, die_at=7)
    train(tmp_path / "run", kind, die_at=15)
    resumed = train(tmp_path / "run", kind)
    assert reference is not None and resumed is not None
    assert resumed["start"] == 15
    assert resumed["resumed_from"] == "shadow"
    assert resumed["exactness"] == "exact"  # by twins; Muon is replayed on the GPU itself
    assert resumed["losses"] == reference["losses"][15:]
    assert resumed["digest"] == reference["digest"]


def test_rewritten_gradients_are_logged_as_consumed(tmp_path: Path) -> None:
    """Fused AdamW with a GradScaler rewrites p.grad inside step(): the copy must be the first look."""
    train(tmp_path / "run", "adamw-scaler", die_at=STEPS - 1)
    resumed = train(tmp_path / "run", "adamw-scaler")
    reference = train(None, "adamw-scaler")
    assert resumed is not None and reference is not None
    assert resumed["start"] == STEPS - 1
    assert resumed["digest"] == reference["digest"]
