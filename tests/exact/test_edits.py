"""Weights and state changed outside `step()`: noticed, kept, and not a byte sent without need."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import everystep

from .harness import Job, check, together

KINDS = {
    "adamw": partial(optim.AdamW, lr=0.05),
    "fused": partial(optim.AdamW, lr=0.05, fused=True),
    "sgd": partial(optim.SGD, lr=0.05, momentum=0.9),
    "adafactor": partial(optim.Adafactor, lr=0.05),
}


def edited(kind: str, before: Any, after: Any) -> Job:
    """`before` runs between backward and step, `after` when the step is done."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    optimizer = KINDS[kind](model.parameters())

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        before(step, model, optimizer)
        optimizer.step()
        after(step, model, optimizer)
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn)


def turned(kind: str, before: Any, after: Any) -> Job:
    """A weight that lies the other way round, so that its slots do."""
    job = edited(kind, before, after)
    weight = job.model[0].weight
    weight.data = weight.data.t().contiguous().t()
    return job


def nothing(step: int, model: Any, optimizer: Any) -> None:
    pass


def clamp(step: int, model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def begin_anew(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        model[1].reset_parameters()


def write_slots_unseen(step: int, model: Any, optimizer: Any) -> None:
    """Through `.data`: neither version nor address of a slot changes."""
    if step % 2:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    value.data.mul_(0.5)


def new_parameter(step: int, model: Any, optimizer: Any) -> None:
    """Another object of the same shape takes the place of a parameter, in the module and in the group."""
    if step == 2:
        old, new = model[1].weight, nn.Parameter(model[1].weight.detach() * 0.5)
        params = optimizer.param_groups[0]["params"]
        params[next(i for i, p in enumerate(params) if p is old)] = new
        model[1].weight = new
        optimizer.state.pop(old, None)


def point_elsewhere(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        model[0].weight.data = model[0].weight.data * 0.5


def forget(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        optimizer.state.clear()


def forget_one(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        del optimizer.state[model[0].weight]


def zero_state(step: int, model: Any, optimizer: Any) -> None:
    if step == 2:
        for value in optimizer.state[model[1].weight].values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.zero_()


def every_edit(kind: str) -> Job:
    return together(
        clamp=partial(edited, kind, nothing, clamp),
        between=partial(edited, kind, clamp, nothing),
        begin_anew=partial(edited, kind, nothing, begin_anew),
        elsewhere=partial(edited, kind, point_elsewhere, nothing),
        zero_state=partial(edited, kind, nothing, zero_state),
        unseen=partial(edited, kind, nothing, write_slots_unseen),
        unseen_turned=partial(turned, kind, nothing, write_slots_unseen),
        unseen_before=partial(edited, kind, write_slots_unseen, nothing),
    )


@pytest.mark.parametrize(
    ("kind", "source"), [("fused", "shadow"), ("adafactor", "shadow"), ("sgd", "store")]
)
def test_edits_outside_a_step(tmp_path: Path, kind: str, source: str) -> None:
    check(partial(every_edit, kind), tmp_path, die_at=(4,), source=source)


def every_reset(*kinds: str) -> Job:
    ways = {"after": (nothing, forget), "before": (forget, nothing), "one": (nothing, forget_one)}
    return together(**{f"{k}_{w}": partial(edited, k, *ways[w]) for k in kinds for w in ways})


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parameter_that_is_replaced_by_another(tmp_path: Path, when: str) -> None:
    moments = (new_parameter, nothing) if when == "before" else (nothing, new_parameter)
    check(partial(edited, "adamw", *moments), tmp_path, die_at=(4,))


@pytest.mark.parametrize("kinds", [("adamw", "sgd"), ("adafactor",)], ids=["replayed", "logged"])
def test_optimizer_state_thrown_away(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    check(partial(every_reset, *kinds), tmp_path, die_at=(4,))


def stumbling(kind: str) -> Job:
    """`step()` raises when it has moved the first group; the user goes on all the same."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = KINDS[kind](groups)

    def turn(step: int) -> Any:
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        kept = optimizer.param_groups[1]["lr"]
        if step in (0, 2):
            optimizer.param_groups[1]["lr"] = "not a number"
        try:
            optimizer.step()
        except (TypeError, RuntimeError):
            assert step in (0, 2)
        else:
            assert step not in (0, 2)
        optimizer.param_groups[1]["lr"] = kept
        optimizer.zero_grad()
        return loss.detach()

    return Job(model, optimizer, turn)


def test_step_that_raises_halfway(tmp_path: Path) -> None:
    build = partial(together, **{kind: partial(stumbling, kind) for kind in ("sgd", "adafactor")})
    check(build, tmp_path, die_at=(3,))


@pytest.mark.parametrize("swap", ["values", "pointers"])
def test_average_swapped_in_and_back_sends_nothing(tmp_path: Path, swap: str) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False))
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    average = [torch.full_like(p, 0.5) for p in model.parameters()]
    with everystep.attach(
        model, optimizer, run=tmp_path / "run", every=1, on_failure="raise"
    ) as run:
        run.resume()
        for _ in range(3):
            model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for _there_and_back in range(2):
                _swap(swap, model, average)
            run.seal()
        run.flush(60)
        status = run.status()
        assert (status["edits"], status["rebases"], status["repairs"]) == (0, 0, 0)
        _swap(swap, model, average)  # and one that stays is sent: the count can be not zero
        run.seal()
        assert run.status()["edits"] == len(average)


def _swap(how: str, model: nn.Module, average: list[torch.Tensor]) -> None:
    for i, p in enumerate(model.parameters()):
        if how == "pointers":
            p.data, average[i] = average[i], p.data
        else:
            kept = p.data.clone()
            p.data.copy_(average[i])
            average[i].copy_(kept)


def test_a_post_hook_older_than_attach_edits_too(tmp_path: Path) -> None:
    """What a user's post-hook does to the weights is not what the optimizer did."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def clamp(*_: object) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    with everystep.attach(model, optimizer, run=tmp_path / "run", every=1) as run:
        for _ in run.steps(5):
            model(torch.randn(3, 6)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.flush()
        assert run.status()["repairs"] == 0
    stored = everystep.open_run(tmp_path / "run").tensors()
    assert stored["weight"].tobytes() == model.weight.detach().numpy().tobytes()
    assert abs(stored["weight"]).max() <= 0.1


WIDE = 1500  # 9 MB a weight: several of them, and their slots, are more than is looked at in a step


def wide() -> tuple[nn.ModuleList, nn.ModuleList]:
    """Layers, and an average of them that no optimizer moves."""
    model = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(3))
    return model, copy.deepcopy(model).requires_grad_(False)


def compute(model: nn.ModuleList) -> Any:
    loss = sum(layer(torch.randn(2, WIDE)).square().mean() for layer in model)
    loss.backward()
    return loss.detach()


def averaged(first: int, layers: slice) -> Job:
    """The common idiom, from step `first` on."""
    model, average = wide()
    optimizer = optim.SGD(model.parameters(), lr=0.5)

    def turn(step: int) -> Any:
        optimizer.zero_grad()
        loss = compute(model)
        optimizer.step()
        if step >= first:
            for kept, layer in list(zip(average, model, strict=True))[layers]:
                kept.weight.data.mul_(0.9).add_(layer.weight.data, alpha=0.1)
        return loss

    return Job({"model": model, "average": average}, optimizer, turn)


def damped(first: int, layers: slice) -> Job:
    """Slots of several layers, from step `first` on."""
    model, _ = wide()
    optimizer = optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def turn(step: int) -> Any:
        optimizer.zero_grad()
        loss = compute(model)
        optimizer.step()
        if step >= first:
            for layer in model[layers]:
                optimizer.state[layer.weight]["momentum_buffer"].data.mul_(0.5)
        return loss

    return Job(model, optimizer, turn)


@pytest.mark.parametrize(
    ("first", "layers"),
    [(0, slice(None)), (0, slice(1, 2)), (7, slice(None))],
    ids=["all", "one layer", "from some step on"],
)
def test_edits_of_large_states_at_every_step(tmp_path: Path, first: int, layers: slice) -> None:
    """More than is looked at in one step, and without a trace. That is a habit of the program, so from the
    first such edit on nothing is left out. No fingerprint helps."""
    jobs = {"averaged": partial(averaged, first, layers), "damped": partial(damped, first, layers)}
    check(
        partial(together, **jobs),
        tmp_path,
        total=11,
        die_at=(9,),
        tuning=everystep.Tuning(fingerprint_every=1000),
    )


def test_one_late_edit_of_a_large_state_is_found_within_a_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    model, average = wide()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    given = {
        "on_lag": "wait",
        "on_failure": "raise",
        "tuning": everystep.Tuning(fingerprint_every=1000),
    }
    models = {"model": model, "average": average}
    with everystep.attach(models, optimizer, run=tmp_path / "run", every=1, **given) as run:
        for step in run.steps(10):
            optimizer.zero_grad()
            compute(model)
            optimizer.step()
            if step == 6:
                average[1].weight.data.mul_(0.5)
        status = run.status()
    assert (status["edits"], status["repairs"]) == (1, 0)
    assert caplog.text.count("average.1.weight: edited in a way that leaves no trace") <= 1
    stored = everystep.open_run(tmp_path / "run").tensors()
    for name in ("average.0.weight", "average.1.weight"):
        kept = average[int(name.split(".")[1])].weight
        assert stored[name].tobytes() == kept.detach().numpy().tobytes()
