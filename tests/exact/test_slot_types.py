"""Slots of any type at any step, state under keys that are no parameters, attributes of an optimizer:
whatever a program makes of them comes back, from the shadow's memory and from base and log."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import everystep

from .compare import freeze, same
from .desk import Desk, load
from .harness import SEED, Job, check, look, resume, seed_all, together, unbroken
from .test_durable_log import lose_host

PROGRAMS = int(os.environ.get("EVERYSTEP_PROGRAMS", "15"))
STEPS = 7

# what a slot, or a value in global state, may become; the older value may be used
Make = Callable[[random.Random, torch.Tensor, Any], Any]
KINDS: dict[str, Make] = {
    "none": lambda draw, p, old: None,
    "float": lambda draw, p, old: draw.random(),
    "int": lambda draw, p, old: draw.choice([0, -3, 1 << 70]),
    "text": lambda draw, p, old: draw.choice(["", "é", "\ud800"]),
    "like": lambda draw, p, old: torch.full_like(p, draw.random()),
    "wide": lambda draw, p, old: torch.full_like(p, draw.random(), dtype=torch.float64),
    "shape": lambda draw, p, old: torch.full((draw.randint(0, 3), 2), draw.random()),
    "scalar": lambda draw, p, old: torch.tensor(draw.random()),
    "bool": lambda draw, p, old: torch.tensor([True, False]),
    "transposed": lambda draw, p, old: torch.full((3, 2), draw.random()).t(),
    "conjugate": lambda draw, p, old: torch.full((2,), complex(0, draw.random())).conj(),
    "list": lambda draw, p, old: [torch.full_like(p, draw.random()), None, draw.random()],
    "dict": lambda draw, p, old: {"m": torch.full_like(p, draw.random()), 1: (draw.random(),)},
    "grown": lambda draw, p, old: [*(old if isinstance(old, list) else []), draw.random()][-4:],
    "again": lambda draw, p, old: old.clone() if isinstance(old, torch.Tensor) else old,
}
NAMES = {"a": 12, "b": 4, "c": 2, "with/slash": 1, 7: 1, "": 1}  # and how often


def weight_of(value: Any) -> float:
    """A number that depends on everything a value holds."""
    if isinstance(value, torch.Tensor):
        return float(value.to(torch.complex128).abs().sum()) + value.dim()
    if isinstance(value, dict):
        return weight_of(list(value.values()))
    if isinstance(value, list | tuple):
        return sum(map(weight_of, value)) + len(value)
    return float(len(value) if isinstance(value, str) else value or 0.5) % 3


def shuffle(draw: random.Random, state: dict[Any, Any], p: torch.Tensor) -> None:
    """Some slots come, some go, some become something else."""
    for name in draw.choices(list(NAMES), list(NAMES.values()), k=draw.randint(0, 2)):
        if draw.random() < 0.25:
            state.pop(name, None)
        else:
            state[name] = KINDS[draw.choice(list(KINDS))](draw, p, state.get(name))


class Shifting(optim.Optimizer):
    """Counts in an attribute, and under a key that is no parameter; both decide what it does."""

    def __init__(self, params: Any, seed: int) -> None:
        super().__init__(params, {"lr": 0.05})
        self.count = 0
        self.past: list[float] = []
        self.mean = torch.zeros(2)
        self.everything = [p for group in self.param_groups for p in group["params"]]
        self.measure = weight_of
        self.pace = 1.0
        setattr(self, "ema-decay", 0.9)
        self._seed = seed

    @property
    def pace(self) -> float:
        """Kept under its own name, behind the property."""
        pace: float = vars(self)["pace"]
        return pace

    @pace.setter
    def pace(self, pace: float) -> None:
        vars(self)["pace"] = pace

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.pace += 0.1
        vars(self)["ema-decay"] *= 0.9
        shared = self.state.setdefault("shared", {"count": 0})
        shared["count"] += 1
        shared["mean"] = shared.get("mean", torch.zeros(())) + self.count
        if self.count % 3 == 2:
            self.state[("odd", self.count)] = self.count
        elif self.count % 3 == 1:
            self.state.pop(("odd", self.count - 2), None)
        self.past = [*self.past, shared["count"] / self.count][-3:]
        self.mean.mul_(0.5).add_(sum(self.past))
        for i, p in enumerate(self.everything):
            if p.grad is None:
                continue
            draw = random.Random(f"{self._seed} {self.count} {shared['count']} {i}")
            state = self.state[p]
            shuffle(draw, state, p)
            slots = [state[name] for name in sorted(state, key=repr)]
            scale = self.measure([*slots, self.mean, shared["mean"]])
            lr = self.param_groups[0]["lr"] / self.pace * vars(self)["ema-decay"]
            p.sub_(p.grad, alpha=lr / (1 + scale))


def adam(params: Any, seed: int) -> optim.Optimizer:
    return optim.Adam(params, lr=0.05, foreach=seed % 2 == 0)


def program(make: Any, seed: int) -> Job:
    """Besides training, slots and global state are edited by hand, thrown away, or emptied."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = make(model.parameters(), seed)

    def edit(draw: random.Random) -> None:
        p = draw.choice(list(model.parameters()))
        own = [k for k in optimizer.state if not isinstance(k, torch.Tensor)]
        deed = draw.randrange(8)
        if deed == 0:
            optimizer.state.pop(p, None)
        elif deed == 1 and isinstance(optimizer, Shifting):
            optimizer.state[p] = {}
        elif deed == 2 and own:
            del optimizer.state[draw.choice(own)]
            if isinstance(optimizer, Shifting):
                optimizer.count = draw.randrange(9)
        elif deed == 3:
            optimizer.state["other"] = KINDS[draw.choice(list(KINDS))](draw, p, None)
        elif deed == 4 and p in optimizer.state:
            for value in optimizer.state[p].values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.mul_(0.5)
        elif deed == 5 and p in optimizer.state:
            state = optimizer.state[p]
            for name in [n for n in state if n in NAMES][:1]:
                state["c"] = state.pop(name)
        elif p in optimizer.state or isinstance(optimizer, Shifting):
            shuffle(draw, optimizer.state[p], p)

    def turn(step: int) -> None:
        draw = random.Random(f"{seed} {step}")
        for _ in range(draw.choice([0, 1, 1, 2])):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            if draw.random() < 0.3:
                edit(draw)
            optimizer.step()
        for _ in range(draw.choice([0, 1, 2])):
            edit(draw)

    return Job(model, optimizer, turn)


def seen(job: Job) -> Any:
    optimizer = job.optimizer
    order = ["p" if isinstance(k, torch.Tensor) else k for k in optimizer.state]
    own = {n: v for n, v in vars(optimizer).items() if n in ("count", "past", "mean", "_seed")}
    assert not own or optimizer.everything[0] is job.model[0].weight, "a reference was replaced"
    return {"look": look(job, whole=False), "order": repr(order), "own": freeze(own)}


def comes_back(make: Any, log: bool, seed: int) -> None:
    """Record a program; at some steps bring it back in every way there is."""
    draw = random.Random(seed)
    seed_all(seed)
    job = program(make, seed)
    desk = Desk(job, log=log)
    bases = [desk.base()]
    for step in range(STEPS):
        job.turn(step)
        desk.seal(step + 1)
        if draw.random() < 0.5:
            bases.append(desk.base())
        if draw.random() < 0.5 or step == STEPS - 1:
            expected = seen(job)
            for found in [desk.base(), *(desk.behind(base) for base in bases)]:
                told = f"seed {seed}, step {step + 1} from a base of {found.point.step}"
                same(expected, seen(load(found, partial(program, make, seed), log=log)), told)
    desk.close()


@pytest.mark.parametrize(
    ("make", "log"),
    [(Shifting, True), (Shifting, False), (adam, True), (adam, False)],
    ids=["log", "state", "replay", "replay as state"],
)
def test_whatever_slots_are_made_of(make: Any, log: bool) -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    for number in range(PROGRAMS):
        comes_back(make, log, SEED + number)


class Apart(optim.Optimizer):
    """Keeps tensors on the CPU and on the device of the parameters, under every kind of name."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.own = self.far = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        device = parameters[0].device
        shared = self.state.setdefault("shared", {"far": torch.zeros((), device=device)})
        shared["far"] += 1
        self.far = torch.ones(2, device=device) if self.far is None else self.far.mul_(1.5)
        self.own = torch.ones(2) if self.own is None else self.own.mul_(1.5)
        for p in parameters:
            state = self.state[p]
            state["step"] = state.get("step", torch.zeros((), device=device)) + shared["far"]
            state["near"] = state.get("near", torch.zeros(2)) + self.own
            state["both"] = [p.grad.sign(), torch.ones(2)]
            state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
            p.sub_(state["m"], alpha=0.01 / float(state["near"].sum() + self.far.sum()))


def devices(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.device.type
    inner = value.values() if isinstance(value, dict) else value
    return [devices(v) for v in inner] if isinstance(value, dict | list) else None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("log", [True, False])
def test_slots_come_back_to_their_devices(device: str, log: bool) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def build() -> Job:
        model = nn.Linear(3, 2).to(device)
        optimizer = Apart(model.parameters())

        def turn(step: int) -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 3, device=device)).square().mean().backward()
            optimizer.step()

        return Job(model, optimizer, turn)

    seed_all(SEED)
    job = build()
    desk = Desk(job, log=log)
    base = desk.base()
    for step in range(4):
        job.turn(step)
        desk.seal(step + 1)
    for found in (desk.base(), desk.behind(base)):
        back = load(found, build, log=log)
        same(look(job, whole=False), look(back, whole=False), "loaded")
        for name in ("own", "far"):
            same(freeze(getattr(job.optimizer, name)), freeze(getattr(back.optimizer, name)), name)
            assert getattr(back.optimizer, name).device == getattr(job.optimizer, name).device
        for p, q in zip(job.model.parameters(), back.model.parameters(), strict=True):
            was, now = job.optimizer.state[p], back.optimizer.state[q]
            assert {n: devices(was[n]) for n in was} == {n: devices(now[n]) for n in was}
        assert devices(back.optimizer.state["shared"]) == [device]
    desk.close()


def lbfgs() -> Job:
    """Its slots become tensors, numbers and lists; what it is steered by lies under a key of its own."""
    model = nn.Linear(3, 2)
    optimizer = optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4)
    optimizer.state["k"] = 0

    def turn(step: int) -> Any:
        x = torch.randn(4, 3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.state["k"] += 1
        return optimizer.step(closure).detach() * optimizer.state["k"]

    return Job(model, optimizer, turn)


def everything() -> Job:
    return together(lbfgs=lbfgs, shifting=partial(program, Shifting, SEED))


def test_a_lost_host_and_a_log(tmp_path: Path) -> None:
    end, losses, _ = unbroken(lbfgs, 9)
    lose_host(lbfgs, tmp_path / "run", 6, batch=1)
    assert everystep.open_run(tmp_path / "run").steps[-1] < 6, (
        "a base was written: no log is needed"
    )
    outcome = resume(lbfgs, tmp_path / "run", 9, seed=SEED + 1, durable_log=1)
    assert (outcome.start, outcome.status["resumed_from"]) == (6, "store")
    same(losses, {**losses, **outcome.losses}, "losses")
    same(end, outcome.end, "end")


@pytest.mark.parametrize("log", [True, False])
def test_a_killed_trainer(tmp_path: Path, log: bool) -> None:
    check(everything, tmp_path, total=7, die_at=(4,), tuning=everystep.Tuning(log=log))
