"""The measurements give what they promise; how good the figures are is not a test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def bench(*words: str) -> str:
    """With one thread: others, of tests beside it, would wait for each other's cores."""
    command = [sys.executable, "-m", "everystep", "bench", *words]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_overhead(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    methods = "none,everystep,everystep-state,torch.save"
    small = ("--model", "gpt-tiny", "--batch", "1", "--steps", "3", "--methods", methods)
    picture = tmp_path / "overhead.png"
    files = ("-o", str(file), "--plot", str(picture), "--folder", str(tmp_path))
    shown = json.loads(bench("overhead", *small, *files, "--json"))
    document: dict[str, Any] = json.loads(file.read_bytes())
    assert document == shown
    assert set(document["methods"]) == set(methods.split(",")) and document["failed"] == {}
    for found in document["methods"].values():
        assert found["ratio"] > 0 and found["p99_seconds"] >= found["median_seconds"] > 0
    for name in ("everystep", "everystep-state"):
        ours = document["methods"][name]
        assert ours["durable_step_after_close"] == ours["trainer_step"] >= 3
        assert ours["records_dropped"] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_copy(tmp_path: Path) -> None:
    found = json.loads(bench("copy", "--json", "--gigabytes", "0.01", "--folder", str(tmp_path)))
    assert found["memory"]["copy"] > 0 and found["disk"]["best"] > 0


def test_an_unknown_method_is_refused() -> None:
    command = [sys.executable, "-m", "everystep", "bench", "overhead", "--methods", "magic"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2 and "magic" in done.stderr and "torch.save" in done.stderr


def test_tune(tmp_path: Path) -> None:
    small = ("--batch", "1", "--steps", "3", "--rounds", "1", "--bases", "2")
    small = (*small, "--folder", str(tmp_path))
    found = json.loads(bench("tune", "--json", *small))
    assert found["plan"]["base_every"] >= 1 and found["why"]
    assert 0 < found["predicted_overhead_percent"] <= 5
    windows = {"percent": found["measured_overhead_percent"], "standard_error": None}
    assert found["measured_by_windows"] == windows  # one window tells nothing of its error
    assert list(tmp_path.iterdir()) == []
