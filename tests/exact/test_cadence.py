"""Periodic checkpoints without a log, and state at every step instead of gradients."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn, optim

import everystep
from everystep.capture.watching.training_stamp import _BYTES_PER_STEP
from everystep.store.runs import read_lineage

from .harness import Job, check, look, same, seed_all
from .test_nested_steps import Lookahead


def build() -> Job:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = optim.AdamW(model.parameters(), lr=0.05)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(model, optimizer, turn)


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_state_at_every_step_without_a_log(tmp_path: Path, source: str) -> None:
    outcome = check(build, tmp_path, source=source, tuning=everystep.Tuning(log=False))
    assert outcome.status["optimizers"]["optimizer"][0] == "state"


def test_periodic_bases_are_durable_states_of_the_run(tmp_path: Path) -> None:
    seed_all(1)
    job = build()
    run, seen = tmp_path / "run", {}
    options = {
        "every": 5,
        "keep": everystep.Keep(last=100),
        "on_lag": "wait",
        "on_failure": "raise",
    }
    with everystep.attach(job.model, job.optimizer, run=run, **options) as training:
        for step in training.steps(23):
            seen[step] = look(job, whole=False)
            time.sleep(0.15)  # a real step takes a while; the shadow asks for a base in between
            job.turn(step)
        seen[23] = look(job, whole=False)
        status = training.status()
    assert status["mode"] in ("periodic", "basing")  # the last base may just be due
    assert status["records_dropped"] == 0
    steps = everystep.open_run(run).steps
    assert steps[0] == 0 and steps[-1] == 23, steps
    assert 3 <= len(steps) <= 23 // 5 + 2, steps
    # the last is written at close, and one may just have been under way
    assert len(steps) - 2 <= status["bases_written"] <= len(steps), status["bases_written"]
    for step in steps:
        fresh = build()
        assert everystep.restore(run, fresh.model, fresh.optimizer, step=step) == step
        same(seen[step], look(fresh, whole=False), f"base at {step}")


def test_flush_takes_a_base_between_two_periods(tmp_path: Path) -> None:
    check(build, tmp_path, source="store", every=100)


def nested() -> Job:
    """Its wrapper is sent as state: what a call moves cannot be told apart."""
    job = build()
    base = optim.SGD(job.model.parameters(), lr=0.05)
    own = Lookahead(base)

    def turn(step: int) -> Any:
        loss = job.model(torch.randn(4, 5)).square().mean()
        own.zero_grad()
        loss.backward()
        own.step()
        return loss.detach()

    return Job(job.model, {"own": own, "base": base}, turn)


@pytest.mark.parametrize("make", [build, nested])
def test_a_step_flushed_between_two_periods_is_not_taken_for_the_next_one(
    make: Callable[[], Job], tmp_path: Path
) -> None:
    """A base refers to what an earlier one holds of atoms whose version is the same."""
    seed_all(1)
    job, run, seen = make(), tmp_path / "run", {}
    options = {"every": 50, "keep": everystep.Keep(last=100), "on_failure": "raise"}
    with everystep.attach(job.model, job.optimizer, run=run, **options) as training:
        for step in training.steps(8):
            if step % 3:  # what is flushed was not recorded, or was recorded after a flush
                seen[training.flush()] = look(job, whole=False)
            job.turn(step)
    for step, expected in seen.items():
        fresh = make()
        assert everystep.restore(run, fresh.model, fresh.optimizer, step=step) == step
        same(expected, look(fresh, whole=False), f"base at {step}")


def test_flush_in_a_turn_writes_what_the_seal_saw(tmp_path: Path) -> None:
    """The turn has drawn numbers and a batch by then."""
    seed_all(1)
    job, place = build(), {"batch": 0}
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", state={"place": place}, every=50
    ) as run:
        for step in run.steps(4):
            sealed = torch.get_rng_state()
            place["batch"] += 1
            torch.randn(1)
            if step == 3:
                assert run.flush(60) == 3
                shutil.copytree(run.path, tmp_path / "copy")
            job.turn(step)
    again, there = build(), {"batch": 0}
    with everystep.attach(
        again.model, again.optimizer, run=tmp_path / "copy", every=1, state={"place": there}
    ) as run:
        assert next(iter(run.steps(4))) == 3
        assert there == {"batch": 3}
        assert torch.equal(torch.get_rng_state(), sealed)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_consumed_may_be_cleared_before_close(
    tmp_path: Path, set_to_none: bool
) -> None:
    seed_all(1)
    job = build()
    run = everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=50)
    for step in range(run.resume(), 7):
        job.turn(step)
        run.seal()
        job.optimizer.zero_grad(set_to_none=set_to_none)
    run.close()
    assert everystep.open_run(tmp_path / "run").steps[-1] == 7


def test_flush_in_a_turn_has_the_groups_of_the_seal(tmp_path: Path) -> None:
    seed_all(1)
    job = build()
    schedule = torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5)
    given = {"run": tmp_path / "run", "state": {"schedule": schedule}}
    with everystep.attach(job.model, job.optimizer, every=50, **given) as run:
        for step in run.steps(4):
            if step == 3:
                schedule.step()
                assert run.flush(60) == 3
                shutil.copytree(run.path, tmp_path / "copy")
            job.turn(step)
    again = build()
    schedule = torch.optim.lr_scheduler.ExponentialLR(again.optimizer, 0.5)
    given = {"run": tmp_path / "copy", "state": {"schedule": schedule}}
    with everystep.attach(again.model, again.optimizer, **given) as run:
        assert (run.step, schedule.last_epoch) == (3, 0)
        assert again.optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("dies", [False, True])
def test_close_of_a_state_that_has_outgrown_its_slot(tmp_path: Path, dies: bool) -> None:
    """Between two bases nobody sends it: close is the first to find out."""
    seed_all(1)
    job, grown = build(), {"seen": b""}
    given = {"run": tmp_path / "run", "state": {"grown": grown}}
    with everystep.attach(job.model, job.optimizer, every=1000, **given) as run:
        for step in run.steps(4):
            job.turn(step)
            grown["seen"] = bytes(1_000_000)
            if step == 2 and dies:
                os.kill(run.status()["pid"], signal.SIGKILL)
    assert everystep.open_run(tmp_path / "run").steps[-1] == 4


def _compute_gradients(job: Job) -> None:
    job.model(torch.randn(4, 5)).square().mean().backward()


def _edit_weights(job: Job) -> None:
    """Neither its version nor its address tells."""
    job.model[0].weight.data.mul_(0.5)


def _edit_slots(job: Job) -> None:
    job.optimizer.state[job.model[0].weight]["exp_avg"].data.mul_(0.5)


@pytest.mark.parametrize("change", [_compute_gradients, _edit_weights, _edit_slots])
def test_flush_behind_a_change_is_refused_where_the_seal_was_not_recorded(
    tmp_path: Path, change: Callable[[Job], None]
) -> None:
    seed_all(1)
    job = build()
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=50) as run:
        for step in run.steps(4):
            if step == 3:
                change(job)
                with pytest.raises(everystep.EverystepError, match="step 3 is not recorded"):
                    run.flush(60)
            job.turn(step)


TOMORROW = """
import time
wall = time.time
time.time = lambda: wall() + 86400
"""


def test_a_base_written_before_the_clock_was_set_back_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It seems to come from tomorrow; an hour of steps may not be lost to that."""
    run, job = tmp_path / "run", build()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TOMORROW)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])  # the shadow's
        with everystep.attach(job.model, job.optimizer, run=run, every=1) as training:
            for step in training.steps(3):
                job.turn(step)
    (newest, *_) = read_lineage(run).candidates
    assert newest.entry.time > time.time() + 3600, "this test shows nothing"
    job, ages = build(), set()
    with everystep.attach(
        job.model, job.optimizer, run=run, every=1, durable_every="1s"
    ) as training:
        deadline = time.monotonic() + 30
        for step in training.steps(1_000_000):
            job.turn(step)
            status = training.status()
            ages.add(status["durable_age_seconds"])
            if status["based_step"] is not None and status["based_step"] > 4:
                break
            assert time.monotonic() < deadline, status
            time.sleep(0.02)
    assert all(age is None or age >= 0 for age in ages), ages


def test_limits_reach_the_shadow_and_it_tells_what_they_hold_up(tmp_path: Path) -> None:
    job = build()
    options = {
        "tuning": everystep.Tuning(
            store_quota="1MB", disk_bytes_per_second="50MB", disk_bytes_per_day=100
        )
    }
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", durable_every=1, **options
    ) as training:
        deadline = time.monotonic() + 30
        for step in training.steps(1_000_000):
            job.turn(step)
            status = training.status()
            if "disk_bytes_per_day (100 B)" in status["problem"]:
                break
            assert time.monotonic() < deadline, status
            time.sleep(0.02)
        assert status["health"] == "degraded" and status["limits"]["written_last_day_bytes"] > 100
        assert status["limits"]["store_quota"] == 1_000_000 > status["limits"]["store_bytes"] > 0
        assert status["limits"]["disk_bytes_per_second"] == 50_000_000
        held_up = status["based_step"]
        training.flush(30)
        assert training.status()["based_step"] == training.step > held_up


def test_steps_that_rest_look_at_a_part_of_large_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To digest all of them would cost more than what `every` saves. Each has its turn."""
    model = torch.nn.Embedding(6 << 18, 4)  # 24 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[memoryview] = []
    plain, patched = xxhash.xxh3_64_intdigest, -1
    with everystep.attach(model, optimizer, run=tmp_path / "run", every=1000) as run:
        for step in run.steps(40):
            if patched < 0 and run.status()["mode"] == "periodic":
                patched = step
                monkeypatch.setattr(
                    xxhash, "xxh3_64_intdigest", lambda view: seen.append(view) or plain(view)
                )
            if step == patched + 6:
                break
            model(torch.randint(100, (4,))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monkeypatch.undo()
        assert patched >= 0 and sum(view.nbytes for view in seen) == 6 * _BYTES_PER_STEP
        places = {np.frombuffer(view, np.uint8).ctypes.data for view in seen}
        assert len(places) == 6, "not each part has had its turn"
