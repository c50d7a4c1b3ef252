"""Trainer and shadow die together: base and log bring the last written step back, with its bits; what is
torn, flipped or missing ends the log before it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ondisk
import pytest
import torch
from torch import nn
from waiting import status_when

import everystep
from everystep.errors import StepUnavailable
from everystep.lane.runtime import read_card, runtime_dir
from everystep.recover.loader import Loader

from .compare import same
from .damage import flip
from .harness import SEED, Job, _forks, kill_shadow, look, resume, seed_all, unbroken

TOTAL = 24
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "grown": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "reset": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "topk": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "muon": lambda p: torch.optim.Muon(p, lr=1e-2),
    "counting": lambda p: Counting(p, {"lr": 0.05}),
    "late": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "idle": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


class Counting(torch.optim.Optimizer):
    """Keeps what it needs in its groups, from the first step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["count"])


def build(kind: str) -> Job:
    """A schedule, clipping by a hook, dropout, edits of weights, and a layer without a gradient at times."""
    bias, width = kind != "muon", 160 if kind == "topk" else 40
    model = nn.Sequential(
        nn.Linear(12, width, bias=bias),
        nn.Dropout(0.1),
        nn.Linear(width, width, bias=bias),
        nn.Linear(width, 2, bias=bias),
    )
    later = list(model[2].parameters()) if kind == "grown" else []
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if all(p is not q for q in later)])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL)
    weights = list(model.parameters())
    if kind == "topk":
        everystep.compress(optimizer, "topk", ratio=0.02)
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(weights, 0.5) and None
    )

    def turn(step: int) -> float:
        loss = model(torch.randn(16, 12)).square().mean()
        if kind == "idle" and step % 4 in (1, 2):  # a turn that only evaluates
            return loss.item()
        loss.backward()
        if step % 5 == 3:
            model[2].weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if kind == "grown" and step == 11:  # records speak of another census from here on
            optimizer.add_param_group({"params": later})
        if kind == "reset" and step == 11:
            optimizer.state.clear()  # momentum begins anew
        if kind == "late" and step == 8:
            optimizer.param_groups[0]["late"] = 0.5
        if step % 7 == 2:
            model[0].weight.data.clamp_(-0.2, 0.2)
        return loss.item()

    return Job(model, optimizer, turn, {"schedule": schedule})


def sgd() -> Job:
    return build("sgd")


def reset() -> Job:
    return build("reset")


def grown() -> Job:
    return build("grown")


def adamw() -> Job:
    return build("adamw")


def muon() -> Job:
    return build("muon")


def topk() -> Job:
    return build("topk")


def counting() -> Job:
    return build("counting")


def late() -> Job:
    return build("late")


def idle() -> Job:
    return build("idle")


def kept_up(training: everystep.Run, step: int) -> None:
    """A step takes as long as writing that one before it: what is lost is then what was not asked for yet.
    Before the first base is written, there is nothing to go on from."""

    def is_durable(told: dict[str, Any]) -> bool:
        return told["durable_step"] is not None and told["durable_step"] >= step

    status_when(training, is_durable, pause=0.002)


def host(
    make: Callable[[], Job], run: Path, home: str, die_at: int, batch: int, pause: float
) -> None:
    """Train in a process of its own; at `die_at` the whole host goes: trainer and shadow."""
    os.environ["EVERYSTEP_RUNTIME_DIR"] = home
    torch.set_num_threads(1)
    try:
        seed_all(SEED)
        job = make()
        with everystep.attach(
            job.model,
            job.optimizer,
            run=run,
            every=1,
            state=job.state,
            durable_log=batch,
            durable_every="1h",
            on_lag="wait",
            on_failure="raise",
        ) as training:
            start, instant = training.step, random.Random(die_at)  # the global one is training's
            for step in training.steps(die_at + 1):
                # the base that an attach begins with comes first, any other one some steps before the end
                if step in (start, die_at - 4, die_at) and not pause:
                    status_when(training, lambda told, at=step: told["durable_step"] == at)
                if step == die_at:
                    card = read_card(runtime_dir(str(run)))
                    assert card is not None
                    os.kill(card.pid, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                job.turn(step)
                if pause:
                    kept_up(training, step + 1 - batch)
                    time.sleep(instant.uniform(0, pause))
    except BaseException:
        Path(f"{run}.error").write_text(traceback.format_exc())
        raise


def lose_host(
    make: Callable[[], Job], run: Path, die_at: int, batch: int, pause: float = 0.0
) -> None:
    home = os.environ["EVERYSTEP_RUNTIME_DIR"]
    child = _forks.Process(target=host, args=(make, run, home, die_at, batch, pause))
    child.start()
    child.join(120)
    error = Path(f"{run}.error")
    assert child.exitcode == -signal.SIGKILL, error.read_text() if error.exists() else "it hangs"
    kill_shadow(run)


@pytest.mark.parametrize(
    ("make", "batch"),
    [*itertools.product([sgd, adamw, muon, reset, counting], [1, 4]), (idle, 1)],
)
def test_a_lost_host(make: Callable[[], Job], batch: int, tmp_path: Path) -> None:
    end, losses, _ = unbroken(make, TOTAL)
    run = tmp_path / "run"
    lose_host(make, run, 9, batch)
    lose_host(make, run, 17, batch)
    assert everystep.open_run(run).steps[-1] < 17, "a base was written: the log is not needed"
    outcome = resume(make, run, TOTAL, seed=SEED + 1, durable_log=batch)
    assert (outcome.start, outcome.status["resumed_from"]) == (17, "store")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")
    assert outcome.status["health"] == "ok"


def test_a_lost_host_after_a_group_was_added(tmp_path: Path) -> None:
    """What was logged before is of another model: a base is written, and the log goes on behind it."""
    end, losses, _ = unbroken(grown, TOTAL)
    lose_host(grown, tmp_path / "run", 17, 1)
    outcome = resume(grown, tmp_path / "run", TOTAL, seed=SEED + 1, durable_log=1)
    assert (outcome.start, outcome.status["resumed_from"]) == (17, "store")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


@pytest.mark.parametrize("chance", range(int(os.environ.get("EVERYSTEP_HOSTS_LOST", "4"))))
def test_a_host_lost_at_any_instant(chance: int, tmp_path: Path) -> None:
    """Only the last batch may be lost, whatever the shadow was doing."""
    print(f"EVERYSTEP_SEED={SEED}")
    source = random.Random(SEED + chance)
    die_at, batch = source.randint(3, TOTAL - 2), source.choice([1, 2, 3])
    make = (sgd, topk)[chance % 2]
    lose_host(make, tmp_path / "run", die_at, batch, pause=0.05)
    end, losses, _ = unbroken(make, TOTAL)
    outcome = resume(make, tmp_path / "run", TOTAL, seed=SEED + 1, durable_log=batch)
    assert die_at - batch <= outcome.start <= die_at
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def interrupted_host(run: Path, home: str) -> None:
    """A turn is taken back at once, so that another shadow goes on behind a log that was not written yet.
    Trainer and shadow die as soon as a later step is said to be durable."""
    os.environ["EVERYSTEP_RUNTIME_DIR"] = home
    torch.set_num_threads(1)
    seed_all(SEED)
    job = sgd()
    given = {"run": run, "state": job.state, "every": 1, "durable_log": 9, "durable_every": "1h"}
    with everystep.attach(job.model, job.optimizer, **given) as training:
        for last in (False, True):
            with contextlib.suppress(KeyboardInterrupt):
                for step in training.steps(TOTAL):
                    kept_up(training, {0: 0, 6: 3}.get(step, -1))
                    job.turn(step)
                    if step == 2 and not last:
                        raise KeyboardInterrupt
                    if step == 6:
                        status = training.status()
                        Path(f"{run}.claimed").write_text(str(status["durable_step"]))
                        os.kill(status["pid"], signal.SIGKILL)
                        os.kill(os.getpid(), signal.SIGKILL)


def test_a_log_that_begins_behind_a_gap_is_not_counted_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = _forks.Process(target=interrupted_host, args=(run, os.environ["EVERYSTEP_RUNTIME_DIR"]))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL, "it hangs"
    kill_shadow(run)
    end, losses, _ = unbroken(sgd, TOTAL)
    outcome = resume(sgd, run, TOTAL, seed=SEED + 1)
    assert outcome.start >= int(Path(f"{run}.claimed").read_text()) > 2
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    lose_host(adamw, tmp_path / "run", 12, 1)
    return tmp_path / "run"


def states_of(make: Callable[[], Job], total: int) -> list[Any]:
    seed_all(SEED)
    job = make()
    states = [look(job, whole=False)]
    for step in range(total):
        job.turn(step)
        states.append(look(job, whole=False))
    return states


def test_every_step_of_the_log_can_be_restored(logged: Path) -> None:
    states = states_of(adamw, 12)
    for step in (0, 1, 5, 11, 12):
        job = adamw()
        assert everystep.restore(logged, job.model, job.optimizer, step=step) == step
        same(states[step], look(job, whole=False), f"step {step}")
    report = everystep.open_run(logged).verify()
    assert (report.problems, report.log_step) == ([], 12)
    with pytest.raises(
        StepUnavailable,
        match=r"by the log every step from 0 to 12;.*durable_log=1.*Keep\(.*every=…",
    ):
        everystep.restore(logged, job.model, job.optimizer, step=13)


@pytest.mark.parametrize("damage", ["cut", "flip", "zeros", "gone", "swapped"])
def test_the_log_ends_before_what_is_wrong(damage: str, logged: Path) -> None:
    states = states_of(adamw, 12)
    path = ondisk.segments(logged, 1)[-1]
    data = bytearray(path.read_bytes())
    chance = random.Random(damage)
    for _ in range(4):
        broken, place = bytearray(data), chance.randrange(4096, len(data))
        if damage == "cut":
            broken = broken[:place]
        elif damage == "flip":
            broken[place] ^= 1 << chance.randrange(8)
        elif damage == "zeros":
            broken[place // 4096 * 4096 :] = bytes(len(data) - place // 4096 * 4096)
        elif damage == "swapped":  # two writes that came in another order
            a, b = sorted(chance.sample(range(1, len(data) // 4096), 2))
            broken[a * 4096 : a * 4096 + 4096] = data[b * 4096 : b * 4096 + 4096]
            place = a * 4096
        path.unlink(missing_ok=True) if damage == "gone" else path.write_bytes(broken)
        job = adamw()
        step = everystep.restore(logged, job.model, job.optimizer)
        same(states[step], look(job, whole=False), f"step {step}")
        assert step == ondisk.segment_after(path) if damage == "gone" else step <= 12
        if damage in ("cut", "flip", "swapped") and place < len(data) // 2:
            assert step < 12, "it was noticed"


@pytest.mark.parametrize(
    ("step", "part", "loads"),
    [(7, "frame", 1), (12, "events", 1), *((step, "gradients", 2) for step in (1, 7, 12))],
)
def test_damage_that_is_met_on_the_way(
    step: int,
    part: str,
    loads: int,
    logged: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where steps before it were replayed in live tensors already, everything is loaded again up to there."""
    end, losses, _ = unbroken(adamw, TOTAL)
    flip(logged, step, part)
    load, loaded = Loader.load, []
    monkeypatch.setattr(Loader, "load", lambda self: loaded.append(self) or load(self))
    with pytest.warns(UserWarning, match=f"the record of step {step} is damaged"):
        outcome = resume(adamw, logged, TOTAL, seed=SEED + 1, durable_log=1)
    assert "damage_met_on_the_way" in caplog.text and len(loaded) == loads
    assert (outcome.start, outcome.status["resumed_from"]) == (step - 1, "store")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


def test_what_abandoned_steps_gave_to_a_group_is_gone(tmp_path: Path) -> None:
    """Their groups had been given back when the damage was met."""
    lose_host(late, tmp_path / "run", 12, 1)
    flip(tmp_path / "run", 5, "gradients")
    job = late()
    assert everystep.restore(tmp_path / "run", job.model, job.optimizer) == 4
    assert "late" not in job.optimizer.param_groups[0]


def test_only_the_weights_of_a_run_whose_log_is_damaged_at_once(logged: Path) -> None:
    flip(logged, 1, "gradients")
    assert everystep.restore(logged, adamw().model) == 0


def test_live_training_is_not_touched_for_a_step_behind_damage(tmp_path: Path) -> None:
    end, _, _ = unbroken(adamw, TOTAL)
    other = adamw()
    seed_all(SEED)
    job = adamw()
    options = {"every": 1, "durable_log": 1, "durable_every": "1h", "on_lag": "wait"}
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", state=job.state, **options
    ) as run:
        for step in run.steps(TOTAL):
            kept_up(run, step if step in (0, 12) else 0)
            job.turn(step)
            if step == 12:
                flip(run.path, 7, "gradients")
                assert everystep.restore(run.path, other.model, other.optimizer, step=6) == 6
                before = look(job)
                with pytest.raises(StepUnavailable, match=r"step 9.*damaged"):
                    run.rewind(9)
                same(before, look(job), "after a rewind that was refused")
                before = look(other, whole=False)
                with pytest.raises(StepUnavailable, match="step 9"):
                    everystep.restore(run.path, other.model, other.optimizer, step=9)
                same(before, look(other, whole=False), "after a restore that was refused")
        same(end, look(job), "end")


def test_old_segments_go_with_the_bases_that_needed_them(tmp_path: Path) -> None:
    job = sgd()
    options = {
        "durable_log": 1,
        "every": 1,
        "durable_every": 10,
        "keep": everystep.Keep(last=2),
        "on_lag": "wait",
    }
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", **options) as run:
        for step in run.steps(80):
            job.turn(step)
            time.sleep(0.02)
    kept = everystep.open_run(tmp_path / "run").steps
    first = [ondisk.segment_after(path) for path in ondisk.segments(tmp_path / "run", 1)]
    assert len(kept) == 2 and first
    assert sum(step < kept[0] for step in first) <= 1, (first, kept)
    for step in range(kept[0], 81, 7):
        job = sgd()
        assert everystep.restore(tmp_path / "run", job.model, job.optimizer, step=step) == step
