"""Training with a bucket behind it: a host is lost, the bucket fails in every way, and training goes on."""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact.compare import same
from exact.harness import SEED, Job, _forks, look, resume, seed_all, unbroken
from hostile.traces import shadows
from torch import nn
from waiting import status_when

import everystep
from everystep.store.bucket.tiers import local_dir

from .server import Proxy

TOTAL = 20


def build() -> Job:
    model = nn.Sequential(nn.Linear(12, 40), nn.Dropout(0.1), nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def turn(step: int) -> float:
        loss = model(torch.randn(16, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Job(model, optimizer, turn)


def host(url: str, home: str, die_at: int, batch: int, failed: str) -> None:
    """Train in a process of its own; once the bucket holds step `die_at`, the whole host goes."""
    os.environ["EVERYSTEP_RUNTIME_DIR"] = home
    torch.set_num_threads(1)
    try:
        seed_all(SEED)
        job = build()
        options = {"every": 1, "durable_log": batch, "durable_every": "1h" if batch else 1}
        with everystep.attach(
            job.model, job.optimizer, run=url, on_lag="wait", on_failure="raise", **options
        ) as training:
            for step in training.steps(die_at + 1):
                if step == die_at:
                    status_when(training, lambda told: told["bucket"]["step"] == die_at)
                    for pid in [*shadows(Path(home)), os.getpid()]:
                        os.kill(pid, signal.SIGKILL)
                job.turn(step)
    except BaseException:
        Path(failed).write_text(traceback.format_exc())
        raise


@pytest.mark.parametrize(("batch", "deaths"), [(0, (6,)), (1, (6, 13))])
def test_the_whole_host_is_lost(
    batch: int, deaths: tuple[int, ...], s3_url: str, tmp_path: Path
) -> None:
    end, losses, _ = unbroken(build, TOTAL)
    failed = tmp_path / "failed"
    for die_at in deaths:
        home = os.environ["EVERYSTEP_RUNTIME_DIR"]
        child = _forks.Process(target=_in(host), args=(s3_url, home, die_at, batch, str(failed)))
        child.start()
        child.join(120)
        why = failed.read_text() if failed.exists() else "it hangs"
        assert child.exitcode == -signal.SIGKILL, why
        shutil.rmtree(local_dir(s3_url))
    outcome = resume(build, s3_url, TOTAL, seed=SEED + 1, durable_log=batch)
    assert (outcome.start, outcome.status["resumed_from"]) == (deaths[-1], "store")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")
    shutil.rmtree(local_dir(s3_url))
    job = build()
    assert everystep.restore(s3_url, job.model, job.optimizer) == TOTAL, (
        "close waits for the bucket"
    )
    assert look(job, whole=False)["models"] == end["models"]


class _in:
    """A function with this process's environment, also in a process that was forked before it was set."""

    def __init__(self, work: Callable[..., None]) -> None:
        self._work = work
        self._environment = {k: v for k, v in os.environ.items() if k.startswith(("AWS", "EVERY"))}

    def __call__(self, *args: Any) -> None:
        os.environ.update(self._environment)
        self._work(*args)


FAULTS: dict[str, dict[str, Any]] = {
    "errors": {"errors": 0.4},
    "drops": {"drops": 0.3, "lost": 0.2},
    "slow and out of order": {"delay_seconds": 0.3},
    "refuses everything": {"refuses": True},
}


def test_the_bucket_misbehaves(proxy: Proxy, s3_url: str) -> None:
    """Nothing waits for it, nothing is lost, it is said why, and afterwards it catches up."""
    end, _, _ = unbroken(build, TOTAL)
    seed_all(SEED)
    job = build()
    phase = TOTAL // len(FAULTS)
    with everystep.attach(
        job.model,
        job.optimizer,
        run=s3_url,
        every=1,
        durable_every=2,
        durable_log=1,
        on_failure="raise",
    ) as run:
        for step in run.steps(TOTAL):
            job.turn(step)
            if step % phase == 0:
                fault = list(FAULTS)[step // phase]
                proxy.heal()
                for name, value in FAULTS[fault].items():
                    setattr(proxy, name, value)
            if step % phase == phase - 1:
                assert run.flush() == step, "the directory does not wait for the bucket"
                assert everystep.open_run(run.path).steps[-1] == step
                asked = proxy.requests
                status_when(run, lambda _, n=asked: proxy.requests > n)  # type: ignore[misc]
        status_when(run, lambda told: "503" in told["problem"])
        assert run.status()["health"] == "degraded" and "bucket" in run.status()["problem"]
        assert run.status()["bucket"]["retries"] > 0
        proxy.heal()
        status_when(run, _is_caught_up)
        assert run.status()["health"] == "ok"
    assert look(job) == end
    shutil.rmtree(run.path)
    fresh = build()
    assert everystep.restore(s3_url, fresh.model, fresh.optimizer) == TOTAL
    assert look(fresh, whole=False)["models"] == end["models"]


def _is_caught_up(status: dict[str, Any]) -> bool:
    bucket = status["bucket"]
    return bucket["behind_steps"] == 0 and bucket["behind_bytes"] == 0 and not status["problem"]


def test_a_bucket_that_stays_away_is_said_at_close(
    proxy: Proxy, s3_url: str, tmp_path: Path
) -> None:
    job = build()
    with (
        pytest.warns(UserWarning, match="bucket: .*503"),
        everystep.attach(
            job.model, job.optimizer, run=tmp_path / "run", every=1, bucket=s3_url
        ) as run,
    ):
        for step in run.steps(3):
            job.turn(step)
        proxy.refuses = True
    assert everystep.open_run(tmp_path / "run").steps[-1] == 3, "the directory has it"
    proxy.heal()
    again = build()
    with everystep.attach(
        again.model, again.optimizer, run=tmp_path / "run", every=1, bucket=s3_url
    ) as run:
        assert run.step == 3
    fresh = build()
    assert everystep.restore(s3_url, fresh.model, fresh.optimizer) == 3, "the next term ships it"


def test_a_trainer_elsewhere_fences_this_one(s3_url: str, tmp_path: Path) -> None:
    first, second = build(), build()
    here = everystep.attach(
        first.model, first.optimizer, run=tmp_path / "a", every=1, bucket=s3_url
    )
    for step in range(here.resume(), 2):
        first.turn(step)
        here.seal()
    here.flush()
    status_when(here, lambda told: told["bucket"]["step"] == 2)
    with everystep.attach(
        second.model, second.optimizer, run=tmp_path / "b", every=1, bucket=s3_url
    ) as there:
        assert there.step == 2
        for step in there.steps(4):
            second.turn(step)
    first.turn(2)
    here.seal()
    here.flush()
    status_when(here, lambda told: told["bucket"]["fenced"])
    assert "another term owns it" in here.status()["problem"]
    with pytest.warns(UserWarning, match="owns it"):
        here.close()
    fresh = build()
    assert everystep.restore(s3_url, fresh.model, fresh.optimizer) == 4
