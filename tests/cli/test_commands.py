"""The command line as programs use it: one JSON document on stdout, exit codes that mean something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep
from everystep.store.layout import name_of


def command(*words: str | Path) -> tuple[int, dict[str, Any], str]:
    """Run a command with --json; stdout must be one document and nothing else."""
    done = subprocess.run(
        [sys.executable, "-m", "everystep", *map(str, words), "--json"],
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """A finished run of three steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with everystep.attach(model, optimizer, run=tmp_path / "run", state={"note": {"k": 1}}) as run:
        for _ in run.steps(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tmp_path / "run"


def test_reading_commands(run_path: Path) -> None:
    code, status, _ = command("status", run_path)
    assert code == 0 and status["durable_step"] == 3 and "host dies → step 3" in status["summary"]
    code, listed, _ = command("ls", run_path)
    assert code == 0 and listed["bases"][0]["step"] == 3
    code, inside, _ = command("inspect", run_path, "3")
    assert code == 0
    assert [a["name"] for a in inside["atoms"]] == ["weight", "bias"]
    assert sorted(inside["atoms"][0]["slots"]) == ["exp_avg", "exp_avg_sq", "step"]
    assert inside["optimizers"][0]["mode"] == "replay"
    code, verified, _ = command("verify", run_path)
    assert code == 0 and verified["ok"] and 3 in verified["valid_steps"]


def test_weights_open_in_safetensors(run_path: Path) -> None:
    from safetensors.numpy import load_file

    stored = everystep.open_run(run_path)
    weights = next(name_of(f) for f in stored.base().files if f.kind == "weights")
    loaded = load_file(run_path / weights)
    assert loaded["weight"].tobytes() == stored.tensors()["weight"].tobytes()
    assert stored.state() == {"note": {"k": 1}}


def test_damage_is_exit_code_one(run_path: Path) -> None:
    victim = max(run_path.rglob("slots.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    code, report, _ = command("verify", run_path)
    assert code == 1 and not report["ok"] and str(victim.name) in report["problems"][0]


@pytest.mark.parametrize("verb", ["status", "ls", "inspect", "verify"])
def test_refusals_are_exit_code_two(tmp_path: Path, verb: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "absent"):
        code, refusal, _ = command(verb, path)
        assert code == 2 and refusal["error"] and refusal["kind"] == "NotARun"


def test_unknown_step_names_the_retained_ones(run_path: Path) -> None:
    code, refusal, _ = command("inspect", run_path, "77")
    assert code == 2 and "not kept" in refusal["error"] and "3" in refusal["hint"]


def test_doctor_says_whether_the_shadow_outlives_its_trainer() -> None:
    code, report, _ = command("doctor")
    assert code == 0 and report["ok"]
    assert report["outlives_why"] and report["facts"]["memory_available_bytes"] > 0


def test_people_get_words_and_pipes_get_no_progress_bar(run_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everystep", "verify", str(run_path)], capture_output=True, text=True
    )
    assert done.returncode == 0 and "all is well" in done.stdout and done.stderr == ""


def test_status_of_a_living_run(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with everystep.attach(model, optimizer, run=tmp_path / "run") as run:
        for _ in run.steps(2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        code, status, _ = command("status", tmp_path / "run")
        assert code == 0 and status["shadow_step"] == 2
        assert status["trainer_pid"] is not None and status["outlives_why"]
        assert "process dies → step 2" in run.status()["summary"]
