"""Crash a training with SIGKILL, resume it with freshly built objects, compare it with a run that
was never broken and never saw everystep: weights, buffers, optimizer state, groups, losses, RNG.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from waiting import wait_until

import everystep
from everystep.lane.runtime import read_card, runtime_dir

from .compare import freeze, same

SEED = int(os.environ.get("EVERYSTEP_SEED", "20260131"))
_CHILD_SECONDS = 120
_forks = multiprocessing.get_context("forkserver")
# the first optimizer of a process imports torch._dynamo, which takes a second
_forks.set_forkserver_preload(["everystep.session", "torch.optim.lr_scheduler", "torch._dynamo"])
torch.set_num_threads(1)  # children must compute in the same order as this process


def nothing() -> None:
    """For jobs that need no iterators."""


@dataclass
class Job:
    """What a user's script builds. `turn` does one step and returns its loss."""

    model: Any
    optimizer: Any
    turn: Callable[[int], Any]
    state: dict[str, Any] = field(default_factory=dict)
    begin: Callable[[], None] = nothing  # after attach: iterators are made here


Build = Callable[[], Job]


@dataclass
class Outcome:
    """How a resumed run ended."""

    run: Path
    start: int
    end: Any
    losses: dict[int, Any]
    status: dict[str, Any]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def named(given: Any) -> dict[str, Any]:
    return dict(given) if isinstance(given, dict) else {"": given}


def look(job: Job, *, whole: bool = True) -> Any:
    """Everything there is to compare; `whole` adds user state and random states."""
    seen: dict[str, Any] = {"models": {}, "optimizers": {}}
    for key, model in named(job.model).items():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        seen["models"][key] = dict(tensors)
    names = {id(t): f"{k}.{n}" for k, m in seen["models"].items() for n, t in m.items()}
    for key, optimizer in named(job.optimizer).items():
        groups = [
            {**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups
        ]
        state = {names.get(id(k), k): optimizer.state[k] for k in list(optimizer.state)}
        seen["optimizers"][key] = {"groups": groups, "state": state}
    if whole:
        seen["state"] = {
            k: v if isinstance(v, dict) else v.state_dict() for k, v in job.state.items()
        }
        seen["rng"] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    return freeze(seen)


def unbroken(build: Build, total: int) -> tuple[Any, dict[int, Any], Any]:
    """The reference, without everystep: end state, losses, and the part that `restore` loads."""
    seed_all(SEED)
    job = build()
    job.begin()
    losses = {step: freeze(job.turn(step)) for step in range(total)}
    return look(job), losses, look(job, whole=False)


def _attach(job: Job, run: Path, options: dict[str, Any]) -> everystep.Run:
    given = {"every": 1, "on_lag": "wait", "on_failure": "raise", **options}
    return everystep.attach(job.model, job.optimizer, run=run, state=job.state, **given)


def _doomed(
    build: Build, run: Path, home: str, die_at: int, seed: int, flush: bool, options: dict[str, Any]
) -> None:
    """In a process of its own: train up to the middle of step `die_at`, then SIGKILL itself."""
    os.environ["EVERYSTEP_RUNTIME_DIR"] = home
    torch.set_num_threads(1)
    try:
        seed_all(seed)
        job = build()
        with _attach(job, run, options) as training:
            job.begin()
            for step in training.steps(die_at + 1):
                if step == die_at and flush:
                    training.flush(60)
                job.turn(step)
                if step == die_at:  # the optimizer has stepped, but nothing has sealed it
                    os.kill(os.getpid(), signal.SIGKILL)
    except BaseException:
        Path(f"{run}.error").write_text(traceback.format_exc())
        raise


def crash(
    build: Build, run: Path, die_at: int, *, seed: int = SEED, flush: bool = False, **options: Any
) -> None:
    home = os.environ["EVERYSTEP_RUNTIME_DIR"]
    child = _forks.Process(target=_doomed, args=(build, run, home, die_at, seed, flush, options))
    child.start()
    child.join(_CHILD_SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
        raise AssertionError(f"the trainer did not reach step {die_at} in {_CHILD_SECONDS} s")
    error = Path(f"{run}.error")
    why = error.read_text() if error.exists() else ""
    assert child.exitcode == -signal.SIGKILL, f"the trainer ended by itself:\n{why}"


def kill_shadow(run: Path) -> None:
    """The host goes down: what only the shadow's memory holds is gone."""
    card = read_card(runtime_dir(str(run)))
    if card is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(card.pid, signal.SIGKILL)
    wait_until(
        lambda: read_card(runtime_dir(str(run))) is None, f"the end of shadow {card.pid}", 10
    )


def resume(build: Build, run: Path, total: int, *, seed: int, **options: Any) -> Outcome:
    """Another process's worth of fresh objects, built from another seed, goes on to the end."""
    seed_all(seed)
    job = build()
    losses = {}
    with _attach(job, run, options) as training:
        start = training.step
        job.begin()
        for step in training.steps(total):
            losses[step] = freeze(job.turn(step))
        end = look(job)
        return Outcome(run, start, end, losses, training.status())


def check(
    build: Build,
    folder: Path,
    *,
    total: int = 6,
    die_at: Sequence[int] = (3,),
    source: str = "shadow",
    **options: Any,
) -> Outcome:
    """Crash at each step of `die_at`, resume from `source`, end as the unbroken run ended."""
    print(f"EVERYSTEP_SEED={SEED}")
    end, losses, loadable = unbroken(build, total)
    run = folder / "run"
    for number, step in enumerate(die_at):
        crash(build, run, step, seed=SEED + number, flush=source == "store", **options)
        if source == "store":
            kill_shadow(run)
    outcome = resume(build, run, total, seed=SEED + len(die_at), **options)
    assert outcome.status["resumed_from"] == source
    assert outcome.start == die_at[-1], f"resumed at {outcome.start}, died in {die_at[-1]}"
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")
    assert outcome.status["health"] == "ok", outcome.status["problem"]
    assert (outcome.status["repairs"], outcome.status["records_dropped"]) == (0, 0)
    _check_store(build, run, total, loadable)
    return outcome


def _check_store(build: Build, run: Path, total: int, loadable: Any) -> None:
    """After close the store alone gives the end state too."""
    seed_all(SEED + 99)
    job = build()
    assert everystep.restore(run, job.model, job.optimizer) == total
    same(loadable, look(job, whole=False), "restored")


def together(**builds: Build) -> Job:
    """Several jobs as one, their names prefixed: each shadow costs seconds, so they share one."""
    jobs = {name: build() for name, build in builds.items()}

    def gather(what: str) -> dict[str, Any]:
        return {
            f"{name}-{key}" if key else name: member
            for name, job in jobs.items()
            for key, member in named(getattr(job, what)).items()
        }

    def begin() -> None:
        for job in jobs.values():
            job.begin()

    def turn(step: int) -> dict[str, Any]:
        return {name: job.turn(step) for name, job in jobs.items()}

    return Job(gather("model"), gather("optimizer"), turn, gather("state"), begin)
