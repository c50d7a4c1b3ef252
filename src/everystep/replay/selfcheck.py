"""Finds the twin that gives an optimizer's bits: awkward values through both, compared as integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from everystep.native import TARGET, mkl_roots
from everystep.replay.optimizers import class_path, step_unseen
from everystep.replay.passes import Rows, Step, run_pass
from everystep.replay.rules.rule import Powers, Rule
from everystep.replay.tensors import dtype_name
from everystep.replay.twins import TWINS, Twin, powers_needed, rule_of

_POWERS_MAX = 1 << 22
_GRADIENTS = 16
Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Probe(NamedTuple):
    """Tensors of these sizes are stepped this often, in passes of `per_pass` records."""

    sizes: Sequence[int] = (1, 3, 1023, 4096)
    steps: int = 6
    per_pass: int = 4
    threads: int = 1


@contextmanager
def in_one_thread() -> Iterator[None]:
    """Threads that torch starts do not survive a fork of the trainer, whose child would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def awkward_values(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Mixed magnitudes, and a few infinities, denormals, signed zeros and NaNs between them."""
    with torch.device("cpu"):  # whatever the user's default is
        return _awkward_floats(count, seed).to(dtype)


@lru_cache(maxsize=256)
def _gradient(count: int, dtype: torch.dtype, step: int, place: int) -> torch.Tensor:
    """Never written to. After a while they come again, but the state they meet is another."""
    return awkward_values(count, dtype, 7 * step + place + 100)


def _awkward_floats(count: int, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=source, dtype=torch.float32)
    values *= torch.pow(10.0, torch.randint(-9, 4, (count,), generator=source).float())
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-42, 3e38, 1e-38], dtype=torch.float32
    )
    if count >= 512:
        places = torch.randint(count, (count // 256,), generator=source)
        values[places] = special[torch.randint(len(special), (len(places),), generator=source)]
    return values


def candidates(rule: Rule, dtype: str, device: torch.device) -> list[Twin]:
    same = [twin for twin in TWINS.values() if twin.rule is rule and twin.dtype == dtype]
    if device.type == "cpu":
        own = _cpu_roots() if rule.takes_roots else "cpu"
        return [twin for twin in same if twin.dialect == own]
    return [twin for twin in same if twin.dialect not in ("cpu", "mkl")]


@cache
def _cpu_roots() -> str:
    """The dialect whose square roots are torch's on this processor, "" if there is none. Few differ, and a
    probe may have none of those: so roots of every size are compared."""
    exponents = np.arange(255, dtype=np.uint32).repeat(512) << 23
    fractions = np.random.default_rng(0).integers(1 << 23, size=len(exponents), dtype=np.uint32)
    numbers = (exponents | fractions).view(np.float32)
    with in_one_thread():
        torchs = torch.from_numpy(numbers).sqrt().numpy()
    if np.array_equal(torchs, np.sqrt(numbers)):
        return "cpu"
    return "mkl" if np.array_equal(torchs, mkl_roots(numbers)) else ""


def device_powers(betas: Iterable[float], device: torch.device) -> Powers | None:
    """Powers of the betas as this device's own function gives them; None: there would be too many."""
    found: dict[float, np.ndarray] = {}
    for beta in betas:
        count = powers_needed(beta)
        if count > _POWERS_MAX:
            return None
        base = torch.tensor(beta, dtype=torch.float32, device=device)
        times = torch.arange(1, count + 1, dtype=torch.float32, device=device)
        found[float(np.float32(beta))] = torch.pow(base, times).cpu().numpy()
    return found


def differences(
    build: Build, device: torch.device, dtype: torch.dtype, probe: Probe
) -> dict[str, int]:
    """For every twin that might do: in how many elements of values and slots it differs."""
    start = [awkward_values(size, dtype, number) for number, size in enumerate(probe.sizes)]
    parameters = [torch.nn.Parameter(value.to(device)) for value in start]
    optimizer = build(parameters)
    rule = rule_of(class_path(optimizer))
    betas = {b for group in optimizer.param_groups for b in group.get("betas", ())}
    powers = device_powers(betas, device)
    if rule is None or powers is None:
        return {}
    mirrors = [
        _Mirror(twin, start, optimizer.param_groups[0], powers, probe)
        for twin in candidates(rule, dtype_name(start[0], "probe"), device)
    ]
    for number in range(probe.steps):
        gradients = [
            _gradient(v.numel(), dtype, number % _GRADIENTS, i) for i, v in enumerate(start)
        ]
        for group in optimizer.param_groups:
            group["lr"] = _lr_at(number, group["lr"])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(device, copy=True)  # some optimizers write into it
        step_unseen(optimizer)
        for mirror in mirrors:
            mirror.step(dict(optimizer.param_groups[0]), gradients)
    return {mirror.twin.name: mirror.differences(optimizer, parameters) for mirror in mirrors}


def drift(
    there: Build, here: Build, device: torch.device, dtype: torch.dtype, probe: Probe
) -> float:
    """How far an optimizer on the CPU gets from one on a device: the largest difference of a value or slot
    after the probe's steps, relative to it."""
    start = [awkward_values(size, dtype, number) for number, size in enumerate(probe.sizes)]
    sides = []
    for build, place in ((there, device), (here, torch.device("cpu"))):
        parameters = [torch.nn.Parameter(value.to(place, copy=True)) for value in start]
        optimizer = build(parameters)
        for number in range(probe.steps):
            for i, parameter in enumerate(parameters):
                gradient = _gradient(parameter.numel(), dtype, number % _GRADIENTS, i)
                parameter.grad = gradient.to(place, copy=True)
            step_unseen(optimizer)
        slots = (s for p in parameters for _, s in sorted(optimizer.state[p].items()))
        tensors = [*(p.detach() for p in parameters), *(s for s in slots if torch.is_tensor(s))]
        sides.append(tensors)
    return max(_apart(a.cpu().double(), b.double()) for a, b in zip(*sides, strict=True))


def _apart(theirs: torch.Tensor, mine: torch.Tensor) -> float:
    usual = theirs.isfinite() & mine.isfinite() & (theirs != 0)
    far = (theirs - mine).abs()[usual] / theirs.abs()[usual]
    return float(far.max()) if far.numel() else 0.0


def _lr_at(number: int, lr: Any) -> Any:
    """Another learning rate at every step, back where it was after two."""
    factor = 1.25 if number % 2 == 0 else 0.8
    return lr.mul_(factor) if isinstance(lr, torch.Tensor) else lr * factor


class _Mirror:
    """The same values, moved by one twin."""

    def __init__(
        self,
        twin: Twin,
        start: list[torch.Tensor],
        group: dict[str, Any],
        powers: Powers,
        probe: Probe,
    ) -> None:
        self.twin, self._powers, self._probe = twin, powers, probe
        self._names = twin.rule.slots_of(group)
        self._tensors = [[v.clone(), *(torch.zeros_like(v) for _ in self._names)] for v in start]
        targets = np.zeros(len(start), TARGET)
        for row, (value, *slots) in zip(targets, self._tensors, strict=True):
            row["value"], row["count"] = value.data_ptr(), value.numel()
            row["slots"][: len(slots)] = [slot.data_ptr() for slot in slots]
        none = np.zeros(len(start), np.int64)
        self._rows = Rows(targets, none, none.copy(), none == 0)
        self._waiting: list[Step] = []
        self._alive: list[list[torch.Tensor]] = []

    def step(self, group: dict[str, Any], gradients: list[torch.Tensor]) -> None:
        plain = {k: _number(v) for k, v in group.items() if k != "params"}
        addresses = np.array([g.data_ptr() for g in gradients], np.uint64)
        self._waiting.append(Step(addresses, [plain]))
        self._alive.append(gradients)
        if len(self._waiting) >= self._probe.per_pass:
            self._run()

    def _run(self) -> None:
        if self._waiting:
            run_pass(self.twin, self._rows, self._waiting, self._powers, self._probe.threads)
        self._waiting, self._alive = [], []

    def differences(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]
    ) -> int:
        self._run()
        total = 0
        for parameter, mine in zip(parameters, self._tensors, strict=True):
            state = optimizer.state[parameter]
            theirs = [parameter.detach(), *(state[name] for name in self._names)]
            total += sum(_differing(a, b) for a, b in zip(mine, theirs, strict=True))
        return total


def _number(value: Any) -> Any:
    """A tensor of one element becomes a number of its own type, as in the shadow."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64):
        return value.cpu().numpy().flat[0] if value.numel() == 1 else None
    return value


def _differing(mine: torch.Tensor, theirs: torch.Tensor) -> int:
    integers = torch.int32 if mine.dtype is torch.float32 else torch.int16
    here = theirs.cpu()
    differ = mine.view(integers) != here.view(integers)
    if theirs.device.type == "cpu":  # an x86 keeps one operand's payload: which one is not said
        differ &= ~(mine.isnan() & here.isnan())
    return int(differ.sum())
