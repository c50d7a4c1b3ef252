"""What is noticed without reading bytes: writes, replacements, things thrown away, silent buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from everystep.capture.census import take_census
from everystep.capture.watching import suspicion
from everystep.capture.watching.state_stamp import StateStamp
from everystep.capture.watching.suspicion import Suspicions
from everystep.capture.watching.watch import Watch


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
    watch = Watch(take_census(model, optimizer), Suspicions())
    assert watch.slots(0) == ([], False)
    change(optimizer.state[model.weight])
    atoms, lost = watch.slots(0)
    assert len(atoms) == 1 and lost == (change is throw_away)
    assert watch.slots(0) == ([], False)


def test_a_state_that_is_gone_altogether_is_lost() -> None:
    _, optimizer = stepped()
    glance = StateStamp(optimizer)
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
    names = [live.census.atoms[a].name for a in Watch(live, Suspicions()).edited_values()]
    assert names == ["running_mean", "running_var", "num_batches_tracked"]


FROZEN = 5
WHOLE_SEALS = suspicion._FIRST_SEALS


class Frozen:
    """Weights that no optimizer moves, of which two of five are looked at in a turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suspicion, "BYTES_PER_STEP", 2 * 4 * 4)
        self.weights = [nn.Parameter(torch.ones(4), requires_grad=False) for _ in range(FROZEN)]
        moved = nn.Parameter(torch.ones(1))
        model = nn.Module()
        model.all = nn.ParameterList([*self.weights, moved])
        self.live = take_census(model, torch.optim.SGD([moved], lr=0.1))
        self.suspicions = Suspicions()
        self.watch = Watch(self.live, self.suspicions)

    def edited(self) -> list[int]:
        """At a seal."""
        names = [self.live.census.atoms[a].name for a in self.watch.edited_values()]
        return sorted(int(name.rpartition(".")[2]) for name in names)

    def pass_first_seals(self) -> None:
        for _ in range(WHOLE_SEALS):
            assert self.edited() == []


def test_the_first_seals_look_at_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for late in range(WHOLE_SEALS):
        frozen = Frozen(monkeypatch)
        for _ in range(late):
            frozen.edited()
        frozen.weights[3].data.mul_(2)
        assert frozen.edited() == [3]


def test_one_edit_without_a_trace_is_found_within_a_turn_and_then_all_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = Frozen(monkeypatch)
    frozen.pass_first_seals()
    frozen.weights[4].data.mul_(2)
    found = [frozen.edited() for _ in range(3)]
    assert found == [[], [], [4]]
    assert "all.4: edited in a way that leaves no trace" in caplog.text
    for _ in range(FROZEN):
        for weight in frozen.weights[1:3]:
            weight.data.mul_(2)
        assert frozen.edited() == [1, 2]
    assert len(caplog.records) == 1


def test_what_else_was_edited_is_found_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = Frozen(monkeypatch)
    frozen.pass_first_seals()
    for weight in frozen.weights:
        weight.data.mul_(2)
    assert frozen.edited() == [*range(FROZEN)]
    assert frozen.edited() == []


def test_what_is_known_of_a_program_outlives_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = Frozen(monkeypatch)
    frozen.weights[0].data.mul_(2)
    frozen.edited()
    frozen.watch = Watch(frozen.live, frozen.suspicions)
    for _ in range(2 * WHOLE_SEALS):
        frozen.weights[3].data.mul_(2)
        assert frozen.edited() == [3]


def test_writes_with_a_trace_neither_raise_suspicion_nor_hold_up_the_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = Frozen(monkeypatch)
    frozen.pass_first_seals()
    for seal in range(FROZEN + 1):
        for weight in frozen.weights[:3]:
            weight.mul_(2)
        if seal == FROZEN:
            assert not caplog.records
            frozen.weights[4].data.mul_(2)
        assert frozen.edited() == [0, 1, 2, 4][: 3 + (seal == FROZEN)]


def test_slots_are_looked_at_whole_until_and_once_it_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(suspicion, "BYTES_PER_STEP", 2 * 4 * 4)
    weights = [nn.Parameter(torch.ones(4)) for _ in range(FROZEN)]
    model, optimizer = nn.ParameterList(weights), torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    watch = Watch(take_census(model, optimizer), Suspicions())

    def step(edited: int | None) -> tuple[list[int], bool]:
        sum(w.sum() for w in weights).backward()
        optimizer.step()
        watch.after_step(0)
        if edited is not None:
            optimizer.state[weights[edited]]["momentum_buffer"].data.mul_(2)
        watch.edited_values()  # a seal
        return watch.slots(0)

    for _ in range(WHOLE_SEALS):
        assert step(None) == ([], False)
    found = [step(3) for _ in range(3)]
    late = found.index(([3], True))  # the whole of it is to be sent: others may have been missed
    assert found[:late] == late * [([], False)]
    assert "3: edited in a way that leaves no trace" in caplog.text
    for atom in (4, 0, 1, 2, 3):
        assert step(atom) == ([atom], False)
    assert len(caplog.records) == 1
