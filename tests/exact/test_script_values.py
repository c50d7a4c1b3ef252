"""An optimizer that the script builds differently: another class is refused. Of other values the checkpoint's
are used and that is told once, unless `override` keeps the script's."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import everystep
from everystep.errors import ModelMismatch, UsageError

from .compare import freeze, same
from .harness import Job, crash, kill_shadow, look, resume, seed_all


class OwnAdamW(optim.AdamW):
    """Only its name is another."""


def job(
    kind: Callable[..., Any] = optim.AdamW,
    lr: float = 0.01,
    schedule: bool = False,
    by_hand: bool = False,
    halves_at: int = -1,
    **values: Any,
) -> Job:
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters(), lr=lr, **values)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) if schedule else None

    def turn(step: int) -> Any:
        if by_hand:
            optimizer.param_groups[0]["lr"] = lr / (step + 2)
        if step == halves_at:
            optimizer.param_groups[0]["lr"] *= 0.5
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        return loss.detach()

    return Job(model, optimizer, turn, {"scheduler": scheduler} if scheduler else {})


def train(made: Job, run: Path, total: int, **options: Any) -> list[str]:
    """To `total`, and close; returns what was warned about at attach."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = everystep.attach(
            made.model,
            made.optimizer,
            run=run,
            every=1,
            state=made.state,
            on_failure="raise",
            **options,
        )
    with training:
        for step in training.steps(total):
            made.turn(step)
    return [str(w.message) for w in caught if "checkpoint" in str(w.message)]


def restore(made: Job, run: Path, **given: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        everystep.restore(run, made.model, made.optimizer, **given)
    return [str(w.message) for w in caught]


def test_another_class_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(job(), run, 1)
    for kind in (optim.SGD, optim.Adam, OwnAdamW):
        other = job(kind)
        before = look(other)
        both = f"torch.optim.adamw:AdamW in the run, {kind.__module__}:{kind.__qualname__} in the script"
        calls: list[Callable[[], Any]] = [
            lambda made=other: everystep.attach(made.model, made.optimizer, run=run, every=1),
            lambda made=other: everystep.restore(run, made.model, made.optimizer),
        ]
        for call in calls:
            with pytest.raises(ModelMismatch, match=re.escape(both)):
                call()
            same(before, look(other), "after the refusal")
    assert everystep.restore(run, other.model) == 1, "weights alone fit"
    other = job(amsgrad=True)
    before = look(other)
    with pytest.raises(UsageError, match="amsgrad=True needs optimizer slots"):
        everystep.attach(other.model, other.optimizer, run=run, every=1, override=("amsgrad",))
    same(before, look(other), "after the refusal")


def test_a_value_changed_in_the_script_is_told_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(job(lr=0.01, weight_decay=0.1), run, 1)
    changed = job(lr=0.02, weight_decay=0.3)
    assert train(changed, run, 2) == [
        "everystep: lr=0.02 in the script, 0.01 in the checkpoint; weight_decay=0.3 in the script, "
        "0.1 in the checkpoint: the checkpoint's are used "
        '(override=("lr", "weight_decay") keeps the script\'s)'
    ]
    assert changed.optimizer.param_groups[0]["lr"] == 0.01
    assert restore(job(lr=0.02, weight_decay=0.3), run) == [], "told before"
    (told,) = restore(job(lr=0.05, weight_decay=0.3), run)
    assert re.fullmatch(r'everystep: lr=0.05 in the script, 0.01 .*override=\("lr",\).*', told)
    kept = job(lr=0.05, weight_decay=0.3)
    assert restore(kept, run, override=["lr"]) == []
    assert (kept.optimizer.defaults["lr"], kept.optimizer.param_groups[0]["lr"]) == (0.05, 0.05)


@pytest.mark.parametrize("how", [{"schedule": True}, {"by_hand": True}])
def test_values_that_training_changes_are_no_difference(how: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(job(**how), run, 3) == []
    again = job(**how)
    assert restore(again, run) == []
    assert again.optimizer.param_groups[0]["lr"] != 0.01, "this test shows nothing"
    (told,) = train(job(lr=0.5, **how), run, 3)
    assert ("initial_lr=0.5" in told and "override" not in told) == ("schedule" in how), told


def overridden(lr: float, dies: bool = False) -> Job:
    made = job(lr=lr, momentum=0.9, kind=optim.SGD, halves_at=3)
    if dies:
        made.begin = partial(os.kill, os.getpid(), signal.SIGKILL)
    return made


@pytest.mark.parametrize("source", ["shadow", "store"])
def test_override_keeps_the_scripts_value_exactly(source: str, tmp_path: Path) -> None:
    """Against a training whose lr was set by hand at that step, and halved in it. A crash right after attach,
    before the loop has begun, keeps it for a script that no longer overrides; one that still does goes on
    with what training has made of it since."""
    run = tmp_path / "run"
    seed_all(7)
    reference = overridden(0.01)
    losses = {}
    for step in range(5):
        if step == 3:
            reference.optimizer.param_groups[0]["lr"] = 0.2
        losses[step] = freeze(reference.turn(step))
    crash(partial(overridden, 0.01), run, 3, seed=7, flush=source == "store")
    if source == "store":
        kill_shadow(run)
    again = partial(overridden, 0.2)
    if source == "shadow":
        crash(partial(overridden, 0.2, dies=True), run, 3, seed=8, override=("lr",))
        crash(again, run, 4, seed=9)
        outcome = resume(again, run, 5, seed=10)
    else:  # everything is sent anew first: a crash before that brings back nothing of this life
        crash(again, run, 4, seed=9, override=("lr",))
        outcome = resume(again, run, 5, seed=10, override=("lr",))
    assert outcome.start == 4
    same(losses, {**losses, **outcome.losses}, "losses")
    same(look(reference), outcome.end, "end")


def test_override_that_cannot_be(tmp_path: Path) -> None:
    def attach(made: Job, *names: str) -> None:
        everystep.attach(
            made.model,
            made.optimizer,
            run=tmp_path / "run",
            every=1,
            state=made.state,
            override=names,
        )

    with pytest.raises(UsageError, match=r"'lrr' is no value[\s\S]*betas.*lr.*weight_decay"):
        attach(job(), "lrr")
    with pytest.raises(UsageError, match=r"'lr' is set at every step by state\['scheduler'\]"):
        attach(job(schedule=True), "lr")
