"""With "auto" the tuner's plan is taken and shown, and what it wrote brings back the bits."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import status_when

import everystep
from everystep.errors import OptionsError
from everystep.lane.runtime import read_card, runtime_dir
from everystep.store.history import lives_of

from .compare import same
from .harness import SEED, _forks, kill_shadow, resume, seed_all, unbroken
from .test_durable_log import adamw

DIE_AT, TOTAL = 120, 130
AUTO: dict[str, Any] = {
    "every": 1,
    "durable_every": "auto",
    "durable_log": "auto",
    "tuning": everystep.Tuning(mtbf="20s"),
    "overhead_budget_percent": 20,
    "on_lag": "wait",
    "on_failure": "raise",
}


def host(run: Path, home: str) -> None:
    """Train until a plan is in force and what it says has reached the disk; then the whole host goes."""
    os.environ["EVERYSTEP_RUNTIME_DIR"] = home
    torch.set_num_threads(1)
    try:
        seed_all(SEED)
        job = adamw()
        with everystep.attach(
            job.model, job.optimizer, run=run, state=job.state, **AUTO
        ) as training:
            for step in training.steps(DIE_AT + 1):
                if step == DIE_AT:
                    status = status_when(training, lambda s: s["durable_step"] == DIE_AT)
                    Path(f"{run}.status").write_text(json.dumps(status, default=str))
                    card = read_card(runtime_dir(str(run)))
                    assert card is not None
                    os.kill(card.pid, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                job.turn(step)
                time.sleep(0.01)
                if step == DIE_AT // 3:
                    status_when(training, lambda s: s["replayed_step"] == DIE_AT // 3)
                if step == DIE_AT * 2 // 3:
                    status_when(training, lambda s: s["tuner"]["plan"] is not None)
    except BaseException:
        Path(f"{run}.error").write_text(traceback.format_exc())
        raise


def test_the_plan_is_followed_shown_and_exact(tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = _forks.Process(target=host, args=(run, os.environ["EVERYSTEP_RUNTIME_DIR"]))
    child.start()
    child.join(120)
    error = Path(f"{run}.error")
    assert child.exitcode == -signal.SIGKILL, error.read_text() if error.exists() else "it hangs"
    kill_shadow(run)
    status = json.loads(Path(f"{run}.status").read_text())
    plan, measured = status["tuner"]["plan"], status["measured"]
    assert plan["base_every"] >= plan["batch"] >= 1, status["tuner"]
    assert 0 <= status["tuner"]["predicted_overhead_percent"] <= AUTO["overhead_budget_percent"]
    assert status["tuner"]["reason"] and status["tuner"]["mtbf_seconds"] == 20
    assert measured["log_writes"] > 0 and measured["iteration_seconds"] > 0
    assert measured["replay_seconds_per_step"] > 0 and measured["record_bytes"] > 0

    end, losses, _ = unbroken(adamw, TOTAL)
    outcome = resume(adamw, run, TOTAL, seed=SEED + 1, **AUTO)
    assert (outcome.start, outcome.status["resumed_from"]) == (DIE_AT, "store")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")
    assert outcome.status["health"] == "ok"
    assert [life.failed for life in lives_of(run, newest_lives=False)] == [True, False]


def test_what_is_neither_a_number_nor_auto_is_refused() -> None:
    for name in ("durable_log", "durable_every"):
        job = adamw()
        with pytest.raises(OptionsError, match=name):
            everystep.attach(job.model, job.optimizer, run="/nowhere", **{name: "often"})
    with pytest.raises(OptionsError, match=r"tuning\.mtbf"):
        everystep.Tuning(mtbf="rarely")
