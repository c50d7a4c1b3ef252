"""A replica whose memory rots, and edits nobody announced, are found at the next fingerprint and repaired
while training goes on."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import status_when

import everystep
from everystep.capture.census import LiveCensus
from everystep.capture.watching.suspicion import Suspicions
from everystep.capture.watching.watch import Watch

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

    def __init__(self, live: LiveCensus, suspicions: Suspicions) -> None:
        super().__init__(live, suspicions)
        self._by_hints = True
        for digests in self._slot_bytes:
            digests._find = list  # type: ignore[method-assign,assignment]
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


def rot_in_replica(pid: int, content: torch.Tensor, rot: Callable[[bytearray], None]) -> None:
    """Change the replica's copy of a tensor, in the shadow's own memory."""
    before = content.detach().numpy().tobytes()
    after = bytearray(before)
    rot(after)
    assert after != before
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "everystep-replica" not in str(link.readlink()):
            continue
        with link.open("r+b", buffering=0) as file:
            at = file.read().find(before)
            if at >= 0:
                os.pwrite(file.fileno(), after, at)
                return
    raise AssertionError("the replica does not hold this tensor")


def flip(bit: int) -> Callable[[bytearray], None]:
    def rot(raw: bytearray) -> None:
        raw[bit // 8] ^= 1 << bit % 8

    return rot


def swap(a: int, b: int, size: int) -> Callable[[bytearray], None]:
    """Two ranges of so many bytes change places."""

    def rot(raw: bytearray) -> None:
        raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]

    return rot


ROT: dict[str, Callable[[torch.Tensor, random.Random], Callable[[bytearray], None]]] = {
    "a flipped bit": lambda tensor, chance: flip(chance.randrange(8 * tensor.nbytes)),
    "swapped halves": lambda tensor, _: swap(0, *[tensor.nbytes // 16 * 8] * 2),
    "swapped rows": lambda tensor, _: swap(0, 2 * tensor[0].nbytes, tensor[0].nbytes),
    "swapped elements": lambda tensor, _: swap(4, 12, 4),
}
PLACES = ["first.weight", "momentum", "frozen.weight", "last.bias"]
# frozen, so that no step's rounding gives away what was moved
CASES = [(place, "a flipped bit") for place in PLACES]
CASES += [("frozen.weight", rot) for rot in ROT if rot != "a flipped bit"]


@pytest.mark.parametrize(("what", "rot"), CASES)
def test_a_replica_that_rots(what: str, rot: str, tmp_path: Path) -> None:
    model, optimizer = build()
    chance = random.Random(what)
    with everystep.attach(
        model,
        optimizer,
        run=tmp_path / "run",
        every=1,
        tuning=everystep.Tuning(fingerprint_every=EVERY),
        on_failure="raise",
        on_lag="wait",
    ) as run:
        for step in run.steps(40):
            if step == 20:
                status = status_when(run, lambda s: s["replayed_step"] == 20)
                assert status["repairs"] == 0 and status["fingerprints_checked"] >= 3
                weight = dict(model.named_parameters())[
                    "first.weight" if what == "momentum" else what
                ]
                tensor = (
                    optimizer.state[weight]["momentum_buffer"] if what == "momentum" else weight
                )
                rot_in_replica(status["pid"], tensor, ROT[rot](tensor, chance))
            if step == 20 + 2 * EVERY:  # a shadow that lags would ask for it too late for this run
                status_when(run, lambda s: s["repairs"])
            turn(model, optimizer)
        status = status_when(run, lambda s: s["replayed_step"] == 40)
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
        model,
        optimizer,
        run=tmp_path / "run",
        every=1,
        tuning=everystep.Tuning(fingerprint_every=1),
        on_failure="raise",
    ) as run:
        for step in run.steps(10):
            if step == 9:
                status = status_when(run, lambda s: s["replayed_step"] == 9)
                rot_in_replica(status["pid"], model.first.weight, flip(12_345))
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
    monkeypatch.setattr("everystep.capture.record.Watch", BlindWatch)
    model, optimizer = build()
    with everystep.attach(
        model,
        optimizer,
        run=tmp_path / "run",
        every=1,
        tuning=everystep.Tuning(fingerprint_every=EVERY),
        on_failure="raise",
        on_lag="wait",
    ) as run:
        for step in run.steps(30):
            if step == 15:
                target = model.last.weight
                slot = optimizer.state[target]["momentum_buffer"]
                (target if where == "weight" else slot).data[2, 7] += 0.5
            turn(model, optimizer)
        status = status_when(run, lambda s: s["repairs"] and s["replayed_step"] is not None)
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
        model,
        optimizer,
        run=tmp_path / "run",
        every=1,
        tuning=everystep.Tuning(fingerprint_every=1),
        on_failure="raise",
    ) as run:
        for step in run.steps(11):
            if step == 9:
                status = status_when(run, lambda s: s["replayed_step"] == 9)
                rot_in_replica(status["pid"], model.first.weight, flip(12_345))
            turn(model, optimizer)
            if step == 10:
                with pytest.raises(everystep.EverystepError, match="the step after it has begun"):
                    run.flush()
    other, its = build()
    assert everystep.restore(tmp_path / "run", other, its) == 11
    expected = freeze([model.state_dict(), optimizer.state_dict()["state"]])
    assert freeze([other.state_dict(), its.state_dict()["state"]]) == expected


def test_a_repair_after_the_model_has_grown(tmp_path: Path) -> None:
    """The old tap sends nothing any more: a new shadow is based instead."""
    model, optimizer = build()
    with everystep.attach(
        model,
        optimizer,
        run=tmp_path / "run",
        every=1,
        tuning=everystep.Tuning(fingerprint_every=1),
        on_failure="raise",
    ) as run:
        for step in run.steps(10):
            if step == 9:
                status = status_when(run, lambda s: s["replayed_step"] == 9)
                rot_in_replica(status["pid"], model.first.weight, flip(12_345))
            turn(model, optimizer)
        status_when(run, lambda s: s["repairs"])
        optimizer.add_param_group({"params": list(model.frozen.parameters())})
        run.flush(30)
    other, _ = build()
    assert everystep.restore(tmp_path / "run", other) == 10
    assert freeze(other.state_dict()) == freeze(model.state_dict())
