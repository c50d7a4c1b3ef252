"""A replica whose memory rots, and edits nobody announced, are found at the next fingerprint and repaired
while training goes on."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.capture.census import LiveCensus
from everystep.capture.watch import Watch

from .compare import freeze
from .lagging import use_lagging_sides

EVERY = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = (
            nn.Linear(40, 301),
            nn.Linear(301, 301),
            nn.Linear(301, 5),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)).relu())


class BlindWatch(Watch):
    """Looks at versions and addresses only, as on a GPU."""

    def __init__(self, live: LiveCensus) -> None:
        super().__init__(live)
        self._by_hints = True
        self.mark_all()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.01, momentum=0.9)


def turn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flip_in_replica(pid: int, content: torch.Tensor, bit: int) -> None:
    """Flip a bit of the replica's copy of a tensor, in the shadow's own memory."""
    wanted = content.detach().numpy().tobytes()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "everystep-replica" not in str(link.readlink()):
            continue
        with link.open("r+b", buffering=0) as file:
            at = file.read().find(wanted)
            if at >= 0:
                byte = os.pread(file.fileno(), 1, at + bit // 8)[0] ^ (1 << bit % 8)
                os.pwrite(file.fileno(), bytes([byte]), at + bit // 8)
                return
    raise AssertionError("the replica does not hold this tensor")


def until(run: Any, reached: Any) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while not reached(status := run.status()):
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


@pytest.mark.parametrize("what", ["first.weight", "momentum", "frozen.weight", "last.bias"])
def test_a_flipped_bit_in_the_replica(what: str, tmp_path: Path) -> None:
    model, optimizer = build()
    chance = random.Random(what)
    with everystep.attach(
        model,
        optimizer,
        run=tmp_path / "run",
        fingerprint_every=EVERY,
        on_failure="raise",
        on_lag="wait",
    ) as run:
        for step in run.steps(40):
            if step == 20:
                status = until(run, lambda s: s["replayed_step"] == 20)
                assert status["repairs"] == 0 and status["fingerprints_checked"] >= 3
                weight = dict(model.named_parameters())[
                    "first.weight" if what == "momentum" else what
                ]
                tensor = (
                    optimizer.state[weight]["momentum_buffer"] if what == "momentum" else weight
                )
                flip_in_replica(status["pid"], tensor, chance.randrange(8 * tensor.nbytes))
            if step == 20 + 2 * EVERY:  # a shadow that lags would ask for it too late for this run
                until(run, lambda s: s["repairs"])
            turn(model, optimizer)
        status = until(run, lambda s: s["replayed_step"] == 40)
        assert status["repairs"] == 1, "not found, or found again after the repair"
        assert status["repaired"] == ["first.weight" if what == "momentum" else what]
        assert status["exactness"] == "exact" and status["rebases"] == 1
    expected = freeze([model.state_dict(), optimizer.state_dict()["state"]])
    other, its = build()
    assert everystep.restore(tmp_path / "run", other, its) == 40
    assert freeze([other.state_dict(), its.state_dict()["state"]]) == expected


@pytest.mark.parametrize("ending", ["flush", "close"])
def test_nothing_is_written_that_is_known_to_be_wrong(ending: str, tmp_path: Path) -> None:
    """The last record shows that an atom rotted: it is sent again before the store gets it."""
    model, optimizer = build()
    with everystep.attach(
        model, optimizer, run=tmp_path / "run", fingerprint_every=1, on_failure="raise"
    ) as run:
        for step in run.steps(10):
            if step == 9:
                status = until(run, lambda s: s["replayed_step"] == 9)
                flip_in_replica(status["pid"], model.first.weight, 12_345)
            turn(model, optimizer)
        if ending == "flush":
            run.flush()
            assert run.status()["repairs"] == 1
    other, its = build()
    assert everystep.restore(tmp_path / "run", other, its) == 10
    expected = freeze([model.state_dict(), optimizer.state_dict()["state"]])
    assert freeze([other.state_dict(), its.state_dict()["state"]]) == expected


@pytest.mark.parametrize("where", ["weight", "slot"])
def test_an_edit_that_nobody_announced(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU only hints tell of edits, and a write through `.data` leaves none."""
    use_lagging_sides(monkeypatch, seed=3, eagerness=0.3)
    monkeypatch.setattr("everystep.capture.tap.Watch", BlindWatch)
    model, optimizer = build()
    with everystep.attach(
        model,
        optimizer,
        run=tmp_path / "run",
        fingerprint_every=EVERY,
        on_failure="raise",
        on_lag="wait",
    ) as run:
        for step in run.steps(30):
            if step == 15:
                target = model.last.weight
                slot = optimizer.state[target]["momentum_buffer"]
                (target if where == "weight" else slot).data[2, 7] += 0.5
            turn(model, optimizer)
        status = until(run, lambda s: s["repairs"] and s["replayed_step"] is not None)
        assert status["repaired"] == ["last.weight"] and status["edits"] == 0
        run.flush()
    other, its = build()
    assert everystep.restore(tmp_path / "run", other, its) == 30
    expected = freeze([model.state_dict(), optimizer.state_dict()["state"]])
    assert freeze([other.state_dict(), its.state_dict()["state"]]) == expected


def test_a_repair_does_not_take_in_half_of_the_next_step(tmp_path: Path) -> None:
    """A flush after `optimizer.step()` and before its seal: what goes to the store is no later step."""
    model, optimizer = build()
    with everystep.attach(
        model, optimizer, run=tmp_path / "run", fingerprint_every=1, on_failure="raise"
    ) as run:
        for step in run.steps(11):
            if step == 9:
                status = until(run, lambda s: s["replayed_step"] == 9)
                flip_in_replica(status["pid"], model.first.weight, 12_345)
            turn(model, optimizer)
            if step == 10:
                with pytest.raises(everystep.EverystepError, match="the next one has begun"):
                    run.flush()
    other, its = build()
    assert everystep.restore(tmp_path / "run", other, its) == 11
    expected = freeze([model.state_dict(), optimizer.state_dict()["state"]])
    assert freeze([other.state_dict(), its.state_dict()["state"]]) == expected


def test_a_repair_after_the_model_has_grown(tmp_path: Path) -> None:
    """The old tap sends nothing any more: a new shadow is based instead."""
    model, optimizer = build()
    with everystep.attach(
        model, optimizer, run=tmp_path / "run", fingerprint_every=1, on_failure="raise"
    ) as run:
        for step in run.steps(10):
            if step == 9:
                status = until(run, lambda s: s["replayed_step"] == 9)
                flip_in_replica(status["pid"], model.first.weight, 12_345)
            turn(model, optimizer)
        until(run, lambda s: s["repairs"])
        optimizer.add_param_group({"params": list(model.frozen.parameters())})
        run.flush(30)
    other, _ = build()
    assert everystep.restore(tmp_path / "run", other) == 10
    assert freeze(other.state_dict()) == freeze(model.state_dict())
