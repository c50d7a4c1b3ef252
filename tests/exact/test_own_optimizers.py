"""Optimizers that no other process can import, because they live in a script's `__main__`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .compare import same
from .harness import kill_shadow
from .own_optimizers import DIED

SCRIPT = Path(__file__).with_name("own_optimizers.py")


def script(*words: Any) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_classes_of_main(tmp_path: Path, source: str) -> None:
    run, expected, found = tmp_path / "run", tmp_path / "expected", tmp_path / "found"
    done = script(run, expected, "reference")
    assert done.returncode == 0, done.stderr
    end, losses, _ = pickle.loads(expected.read_bytes())
    died = script(run, found, "die", *(["flush"] if source == "store" else []))
    assert died.returncode == -signal.SIGKILL, died.stderr
    if source == "store":
        kill_shadow(run)
    done = script(run, found, "resume")
    assert done.returncode == 0, done.stderr
    outcome = pickle.loads(found.read_bytes())
    assert (outcome.start, outcome.status["resumed_from"]) == (DIED, source)
    assert {mode for mode, _ in outcome.status["optimizers"].values()} == {"log"}
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")
