"""`everystep rewind`: the next attach begins at the step that was asked for, a logged one too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.terminal import on_terminal
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


def rewind(run: Path, step: int) -> tuple[int, Any]:
    return command("rewind", run, step, "--yes")


def test_any_step_can_be_the_next(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lose_host(adamw, run, 12, 1)
    states = states_of(adamw, 12)
    for step in (11, 5, 5, 0):
        code, document = rewind(run, step)
        assert (code, document["step"]) == (0, step)
        seed_all(7)
        job = adamw()
        assert everystep.restore(run, job.model, job.optimizer) == step
        same(states[step], look(job, whole=False), f"step {step}")
    with everystep.attach(job.model, job.optimizer, run=run, state=job.state) as training:
        assert training.step == 0
        for step in training.steps(3):
            job.turn(step)
        code, document = rewind(run, 0)
        assert code == 2 and str(run) in str(document), "somebody trains"
    assert everystep.open_run(run).steps[-1] == 3


def test_rules_stay_what_they_were(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = adamw()
    with everystep.attach(
        job.model,
        job.optimizer,
        run=run,
        durable_every=1,
        keep=everystep.Keep(last=50),
        on_lag="wait",
    ) as training:
        for step in training.steps(6):
            job.turn(step)
            training.flush()
    assert rewind(run, 5)[0] == 0
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
    code, document = rewind(run, kept)
    assert (code, document["step"]) == (0, kept)
    again = adamw()
    assert everystep.restore(run, again.model, again.optimizer) == kept


def test_a_person_is_asked_what_will_be_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lose_host(adamw, run, 12, 1)
    newest = command("status", run)[1]["durable_step"]
    lost = f"steps 6 to {newest} will no longer count"
    code, refusal = command("rewind", run, 5)
    assert code == 2 and lost in refusal["error"] and "--yes" in refusal["hint"]
    with on_terminal("rewind", run, 5, columns=300) as terminal:
        terminal.wait_for("[y/N]")
        assert lost in terminal.shown
        terminal.type("n\n")
        assert terminal.finish() == 2 and "nothing was changed" in terminal.shown
    assert command("status", run)[1]["durable_step"] == newest
    assert command("rewind", run, newest)[0] == 0, "nothing is lost: nobody is asked"
    with on_terminal("rewind", run, 5, columns=300) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("y\n")
        assert terminal.finish() == 0 and "the next attach goes on from it" in terminal.shown
    assert command("status", run)[1]["durable_step"] == 5


def test_what_a_waiting_shadow_holds_is_told(tmp_path: Path) -> None:
    """It is newer than the store, and would be what the next attach begins with."""
    run = tmp_path / "run"
    job = adamw()
    training = everystep.attach(job.model, job.optimizer, run=run)
    steps = training.steps(20)
    for step in steps:
        job.turn(step)
        if step == 3:
            training.flush()
        if step == 9:
            break
    with pytest.raises(KeyboardInterrupt), training:
        raise KeyboardInterrupt
    newest = command("status", run)[1]["shadow_step"]
    assert newest > 3
    code, refusal = command("rewind", run, 3)
    assert code == 2 and f"steps 4 to {newest} will no longer count" in refusal["error"]
    assert rewind(run, 3)[0] == 0


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    lose_host(adamw, run, 6, 1)
    code, document = rewind(run, 99)
    assert code == 2 and "not kept" in str(document)
    code, document = rewind(tmp_path / "nothing", 1)
    assert code == 2
