"""`everystep restore`: the next attach begins at the step that was asked for, a logged one too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exact.compare import same
from exact.harness import look, seed_all
from exact.test_durable_log import adamw, lose_host, states_of
from typer.testing import CliRunner

import everystep
from everystep.cli.app import app

runner = CliRunner()


def command(*arguments: object) -> tuple[int, Any]:
    found = runner.invoke(app, [*map(str, arguments), "--json"])
    return found.exit_code, json.loads(found.stdout)


def test_any_step_can_be_the_next(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lose_host(adamw, run, 12, 1)
    states = states_of(adamw, 12)
    for step in (11, 5, 5, 0):
        code, document = command("restore", run, "--step", step)
        assert (code, document["step"]) == (0, step)
        seed_all(7)
        job = adamw()
        assert everystep.restore(run, job.model, job.optimizer) == step
        same(states[step], look(job, whole=False), f"step {step}")
    with everystep.attach(job.model, job.optimizer, run=run, state=job.state) as training:
        assert training.step == 0
        for step in training.steps(3):
            job.turn(step)
        code, document = command("restore", run, "--step", 0)
        assert code == 2 and str(run) in str(document), "somebody trains"
    assert everystep.open_run(run).steps[-1] == 3


def test_rules_stay_what_they_were(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = adamw()
    with everystep.attach(
        job.model, job.optimizer, run=run, durable_every=1, keep_last=50, on_lag="wait"
    ) as training:
        for step in training.steps(6):
            job.turn(step)
            training.flush()
    assert command("restore", run, "--step", 5)[0] == 0
    code, document = command("prune", run, "--dry-run")
    assert code == 0 and document["rules"]["keep_last"] == 50


def test_a_shadow_that_waits_goes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = adamw()
    with (
        pytest.raises(KeyboardInterrupt),
        everystep.attach(job.model, job.optimizer, run=run, durable_log=1) as training,
    ):
        for step in training.steps(20):
            job.turn(step)
            if step == 3:
                training.flush()
            if step == 9:
                raise KeyboardInterrupt
    kept = everystep.open_run(run).steps[0]
    code, document = command("restore", run, "--step", kept)
    assert (code, document["step"]) == (0, kept)
    again = adamw()
    assert everystep.restore(run, again.model, again.optimizer) == kept


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lose_host(adamw, run, 6, 1)
    code, document = command("restore", run, "--step", 99)
    assert code == 2 and "not retained" in str(document)
    code, document = command("restore", tmp_path / "nothing", "--step", 1)
    assert code == 2
