"""What is noticed without reading bytes: writes, replacements, things thrown away, silent buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everystep.capture.census import take_census
from everystep.capture.glance import Glance
from everystep.capture.watch import Watch


def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def write(state: dict[str, Any]) -> None:
    state["exp_avg"].mul_(2)


def replace(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].clone()


def point_elsewhere(state: dict[str, Any]) -> None:
    state["exp_avg"].data = state["exp_avg"].data * 2


def add(state: dict[str, Any]) -> None:
    state["more"] = torch.zeros(1)


def throw_away(state: dict[str, Any]) -> None:
    del state["exp_avg"]


@pytest.mark.parametrize("change", [write, replace, point_elsewhere, add, throw_away])
def test_changed_slots_are_noticed_once(change: Callable[[dict[str, Any]], None]) -> None:
    model, optimizer = stepped()
    watch = Watch(take_census(model, optimizer))
    assert watch.slots(0) == ([], False)
    change(optimizer.state[model.weight])
    atoms, lost = watch.slots(0)
    assert len(atoms) == 1 and lost == (change is throw_away)
    assert watch.slots(0) == ([], False)


def test_a_state_that_is_gone_altogether_is_lost() -> None:
    _, optimizer = stepped()
    glance = Glance(optimizer)
    assert glance.still_holds(optimizer)
    optimizer.state.clear()
    assert not glance.still_holds(optimizer)


@pytest.mark.parametrize("mixed", [False, True])
def test_small_buffers_elsewhere_always_count_as_changed(mixed: bool) -> None:
    """BatchNorm's statistics change without a trace; only on the CPU are bytes compared."""
    model = nn.BatchNorm1d(4)
    if mixed:
        model.on_the_cpu = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = take_census(model, optimizer)
    for atom, (known, tensor) in enumerate(zip(live.census.atoms, live.tensors, strict=True)):
        if known.name != "on_the_cpu":
            live.tensors[atom] = tensor.to("meta")  # a device whose bytes cannot be read
    names = [live.census.atoms[a].name for a in Watch(live).edited_values()]
    assert names == ["running_mean", "running_var", "num_batches_tracked"]
