"""The twins against an independent, slow reading of torch's rules, and against themselves: no bit may depend
on how many steps a pass does, on threads, or on where a tensor is cut."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everystep import native
from everystep.capture.census import take_census
from everystep.native import TARGET
from everystep.replay import choose as choose_module
from everystep.replay import selfcheck
from everystep.replay.choose import _known, choose
from everystep.replay.passes import Rows, Step, run_pass
from everystep.replay.rules import RULES
from everystep.replay.rules.rule import Powers
from everystep.replay.selfcheck import Probe, awkward_values, device_powers, differences, drift
from everystep.replay.twins import TWINS, Twin, powers_needed

pytestmark = pytest.mark.skipif(native.library() is None, reason="the twins were not compiled")

f32, wide = np.float32, np.longdouble
ADAM = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}
SGD = {
    "lr": 1e-2,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.01,
    "nesterov": True,
    "maximize": False,
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "adam": [
        ADAM,
        {**ADAM, "decoupled_weight_decay": False},
        {**ADAM, "weight_decay": 0.0, "amsgrad": True, "maximize": True},
        {**ADAM, "betas": (0.3, 0.6)},
    ],
    "sgd": [
        SGD,
        {**SGD, "momentum": 0.0, "nesterov": False},
        {**SGD, "maximize": True, "nesterov": False, "dampening": 0.1},
    ],
}
CASES = [(name, group) for name, twin in TWINS.items() for group in VARIANTS[twin.rule.name]]
BY_HAND = [  # numpy has not the roots of MKL
    (name, group)
    for name, group in CASES
    if TWINS[name].dtype == "float32" and TWINS[name].dialect != "mkl" and not group.get("amsgrad")
]
STEPS = 7
KNOWN_ROOTS = pytest.mark.skipif(
    native.library() is None or not selfcheck._cpu_roots(),
    reason="torch takes square roots of another kind on this processor",
)


def powers_of(group: dict[str, Any]) -> Powers:
    times = {b: np.arange(1, powers_needed(b) + 1, dtype=f32) for b in group.get("betas", ())}
    return {float(f32(b)): np.power(f32(b), t) for b, t in times.items()}


def moved(
    twin: Twin, group: dict[str, Any], sizes: list[int], k: int, threads: int
) -> list[list[torch.Tensor]]:
    """Values and slots of tensors that the twin moved by STEPS steps, k in each pass."""
    dtype = getattr(torch, twin.dtype)
    whole = awkward_values(sum(sizes), dtype, 1)
    names = twin.rule.slots_of(group)
    tensors = [[v.clone(), *(torch.zeros_like(v) for _ in names)] for v in whole.split(sizes)]
    targets = np.zeros(len(sizes), TARGET)
    for row, (value, *slots) in zip(targets, tensors, strict=True):
        row["value"], row["count"] = value.data_ptr(), value.numel()
        row["slots"][: len(slots)] = [slot.data_ptr() for slot in slots]
    zero = np.zeros(len(sizes), np.int64)
    rows = Rows(targets, zero, zero.copy(), zero == 0)
    gradients = [awkward_values(sum(sizes), dtype, 10 + n) for n in range(STEPS)]
    steps = [
        Step(
            np.array([part.data_ptr() for part in gradient.split(sizes)], np.uint64),
            [{**group, "lr": group["lr"] * (1 + 0.1 * n)}],
            scale=2.0**n if twin.dialect == "fused" else None,
        )
        for n, gradient in enumerate(gradients)
    ]
    for start in range(0, STEPS, k):
        run_pass(twin, rows, steps[start : start + k], powers_of(group), threads)
    return tensors


def bits(tensors: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Value and slots, each as the integers of all tensors one behind the other."""
    kind = torch.int32 if tensors[0][0].dtype is torch.float32 else torch.int16
    return [torch.cat([t.view(kind) for t in same]) for same in zip(*tensors, strict=True)]


@pytest.mark.parametrize(("name", "group"), CASES)
def test_nothing_depends_on_passes_threads_or_cuts(name: str, group: dict[str, Any]) -> None:
    # cuts at multiples of 2048 only: a tensor's length says which lanes a fused kernel has
    expected = bits(moved(TWINS[name], group, [70_000], 1, 1))
    for sizes, k, threads in (([70_000], 7, 1), ([70_000], 4, 3), ([2048, 65_536, 2416], 3, 2)):
        found = bits(moved(TWINS[name], group, sizes, k, threads))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (wide(a) * wide(b) + wide(c)).astype(f32)


def decayed(g: np.ndarray, w: np.ndarray, group: dict[str, Any], fused: bool) -> np.ndarray:
    decay = f32(group["weight_decay"])
    if not group["weight_decay"] or group.get("decoupled_weight_decay"):
        return g
    together = fma(decay, w, g)
    lane = np.arange(len(g)) // (512 if len(g) % 4 else 1) % 4
    return np.where((lane == 0) & fused, g + decay * w, together)


def adam_by_hand(
    dialect: str, group: dict[str, Any], w: Any, m: Any, v: Any, g: Any, t: int
) -> Any:
    beta1, beta2 = group["betas"]
    lr, decay = group["lr"], group["weight_decay"]
    if dialect == "fused":
        b1, b2, table = f32(beta1), f32(beta2), powers_of(group)
        power1, power2 = table[float(b1)][t - 1 :][:1], table[float(b2)][t - 1 :][:1]
        bias1 = f32(1) - (power1[0] if len(power1) else f32(0))
        bias2 = np.sqrt(f32(1) - (power2[0] if len(power2) else f32(0)))
        if group["decoupled_weight_decay"] and decay:
            w = fma(-(f32(lr) * f32(decay)), w, w)
        square = g * g
        m = fma(b1, m, fma(-b1, g, g))
        v = fma(b2, v, fma(-b2, square, square))
        return w - (f32(lr) / bias1 * m) / (np.sqrt(v) / bias2 + f32(group["eps"])), m, v
    if group["decoupled_weight_decay"] and decay:
        w = w * f32(1 - lr * decay)
    weight = f32(1 - beta1)
    m = fma(weight, g - m, m) if weight < 0.5 else fma(-(g - m), f32(1) - weight, g)
    root = (1 - beta2**t) ** 0.5
    if dialect == "cpu":
        v = fma(f32(1 - beta2) * g, g, v * f32(beta2))
        below = np.sqrt(v) / f32(root) + f32(group["eps"])
        return w + (f32(-(lr / (1 - beta1**t))) * m) / below, m, v
    v = fma(f32(1 - beta2), g * g, v * f32(beta2))
    scaled = np.sqrt(v) * f32(1 / root) if dialect == "single" else np.sqrt(v) / f32(root)
    return fma(f32(-(lr / (1 - beta1**t))), m / (scaled + f32(group["eps"])), w), m, v


def sgd_by_hand(group: dict[str, Any], w: Any, m: Any, g: Any, t: int) -> Any:
    step = g
    if group["momentum"]:
        damped = f32(1 - group["dampening"])
        m = g if t == 1 else fma(damped, g, m * f32(group["momentum"]))
        step = fma(f32(group["momentum"]), m, g) if group["nesterov"] else m
    return fma(-f32(group["lr"]), step, w), m


@pytest.mark.parametrize(("name", "group"), BY_HAND)
@pytest.mark.parametrize("size", [4096, 4099])
def test_rules_by_hand(name: str, group: dict[str, Any], size: int) -> None:
    twin = TWINS[name]
    found = moved(twin, group, [size], 4, 2)[0]
    w = awkward_values(size, torch.float32, 1).numpy()
    m, v = np.zeros_like(w), np.zeros_like(w)
    with np.errstate(all="ignore"):
        for n in range(STEPS):
            now = {**group, "lr": group["lr"] * (1 + 0.1 * n)}
            g = awkward_values(size, torch.float32, 10 + n).numpy()
            g = g / f32(2.0**n) if twin.dialect == "fused" else g
            g = decayed(-g if group["maximize"] else g, w, group, twin.dialect == "fused")
            if twin.rule.name == "adam":
                w, m, v = adam_by_hand(twin.dialect, now, w, m, v, g, n + 1)
            else:
                w, m = sgd_by_hand(now, w, m, g, n + 1)
    names = ("value", *twin.rule.slots_of(group))
    for slot, mine, expected in zip(names, found, (w, m, v), strict=False):
        same = (mine.numpy().view(np.int32) == expected.view(np.int32)) | (
            np.isnan(mine.numpy()) & np.isnan(expected)
        )
        assert same.all(), f"{slot}: {int((~same).sum())} of {size} differ"


@pytest.mark.parametrize("group", VARIANTS["sgd"])
def test_sgd_on_the_cpu_is_replayed_bit_for_bit(group: dict[str, Any]) -> None:
    found = differences(
        lambda p: torch.optim.SGD(p, **group), torch.device("cpu"), torch.float32, Probe(steps=9)
    )
    assert found == {"sgd-cpu-float32": 0}


@KNOWN_ROOTS
@pytest.mark.parametrize("group", VARIANTS["adam"])
@pytest.mark.parametrize("rate", ["number", "tensor", "foreach"])
def test_adam_on_the_cpu_is_replayed_bit_for_bit(group: dict[str, Any], rate: str) -> None:
    kind = torch.optim.AdamW if group["decoupled_weight_decay"] else torch.optim.Adam
    settings = {k: v for k, v in group.items() if k != "decoupled_weight_decay"}
    if rate == "tensor":
        settings["lr"] = torch.tensor(group["lr"])
    build = partial(kind, **settings, foreach=rate == "foreach")
    probe = Probe(sizes=(1, 3, 1023, 70_001), steps=9)
    found = differences(build, torch.device("cpu"), torch.float32, probe)
    assert list(found.values()) == [0], found
    assert choose(build([torch.nn.Parameter(torch.ones(3))])).twins == {
        "float32": next(iter(found))
    }


@KNOWN_ROOTS
def test_roots_as_torch_takes_them() -> None:
    """Of numbers of every size, also where a correction would vanish."""
    source = np.random.default_rng(5)
    exponents = np.arange(255, dtype=np.uint32).repeat(257) << 23
    numbers = exponents | source.integers(1 << 23, size=len(exponents), dtype=np.uint32)
    special = np.array([0.0, -0.0, np.inf, -1.0, np.nan, 1e-45], f32)
    second = torch.from_numpy(np.concatenate([numbers.view(f32), special]))
    first, value, gradient = torch.ones_like(second), second * 0.5, torch.zeros_like(second)
    parameter = torch.nn.Parameter(value.clone())
    parameter.grad = gradient.clone()
    optimizer = torch.optim.Adam([parameter], lr=0.1, eps=0.0)
    state = {"step": torch.tensor(1.0), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    optimizer.state[parameter] = state
    optimizer.step()
    targets = np.zeros(1, TARGET)
    targets[0]["value"], targets[0]["count"] = value.data_ptr(), value.numel()
    targets[0]["slots"][:2] = [first.data_ptr(), second.data_ptr()]
    none = np.zeros(1, np.int64)
    step = Step(np.array([gradient.data_ptr()], np.uint64), optimizer.param_groups)
    twin = TWINS[choose(optimizer).twins["float32"]]
    run_pass(twin, Rows(targets, none, none + 1, none == 1), [step], {}, 1)
    theirs = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
    for mine, their in zip((value, first, second), theirs, strict=True):
        same = (mine.view(torch.int32) == their.view(torch.int32)) | (mine.isnan() & their.isnan())
        assert same.all(), (mine[~same][:5], their[~same][:5])
    assert value.isfinite().sum() > 0.9 * len(value)


def test_roots_of_another_kind_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _known.clear()
    monkeypatch.setattr(selfcheck, "_cpu_roots", lambda: "")
    chosen = choose(torch.optim.Adam([torch.nn.Parameter(torch.ones(3))]))
    _known.clear()
    assert chosen.twins == {} and "no twin gives the bits" in chosen.why


def test_a_wrong_twin_is_noticed() -> None:
    """The check that chooses a twin can fail: these round differently."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    powers = device_powers(optimizer.param_groups[0]["betas"], torch.device("cpu"))
    assert powers is not None
    foreach, single = (
        bits(moved(TWINS[f"adam-{dialect}-float32"], ADAM, [4096], 4, 1))[0]
        for dialect in ("foreach", "single")
    )
    assert 0 < int((foreach != single).sum()) < 4096


def test_what_has_no_twin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    assert choose(torch.optim.SGD(parameters, momentum=0.9)).twins == {"float32": "sgd-cpu-float32"}
    assert "no twin" in choose(torch.optim.RMSprop(parameters)).why
    groups = [{"params": []}, {"params": parameters}]  # nothing to decay, say
    assert "no twin" in choose(torch.optim.RMSprop(groups)).why
    narrow = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    assert "no twin gives the bits" in choose(torch.optim.AdamW(narrow)).why
    odd = torch.optim.AdamW(parameters, lr=torch.tensor(0.1, dtype=torch.bfloat16))
    assert "a tensor of another type" in choose(odd).why
    scalar = [torch.nn.Parameter(torch.tensor(2.0))]
    wide_rate = torch.tensor(0.1, dtype=torch.float64)
    assert "without dimensions" in choose(torch.optim.AdamW(scalar, lr=wide_rate)).why
    assert "signs zeros" in choose(torch.optim.Adam(parameters, betas=(0.0, 0.9))).why
    native.library.cache_clear()
    monkeypatch.setenv("EVERYSTEP_NATIVE", "0")
    assert choose(torch.optim.SGD(parameters)).why == "EVERYSTEP_NATIVE=0 leaves the twins out"
    native.library.cache_clear()


def test_absent_gradients_and_their_clocks() -> None:
    twin, group = TWINS["adam-fused-float32"], ADAM
    values = [torch.ones(5), torch.ones(5)]
    slots = [[torch.zeros(5) for _ in RULES["adam"].slots] for _ in values]
    targets = np.zeros(2, TARGET)
    for row, value, own in zip(targets, values, slots, strict=True):
        row["value"], row["count"] = value.data_ptr(), 5
        row["slots"] = [slot.data_ptr() for slot in own]
    zero = np.zeros(2, np.int64)
    rows = Rows(targets, zero, zero.copy(), zero == 0)
    gradient = torch.ones(5)
    only_first = Step(np.array([gradient.data_ptr(), 0], np.uint64), [group])
    run_pass(twin, rows, [only_first, only_first], powers_of(group), 1)
    assert rows.times.tolist() == [2, 0]
    assert torch.equal(values[1], torch.ones(5)) and not torch.equal(values[0], torch.ones(5))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_defaults_of_the_user_do_not_disturb_the_choice(device: str, dtype: torch.dtype) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], momentum=0.5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    _known.clear()
    try:
        with torch.device(device):
            assert choose(optimizer).twins == {"float32": "sgd-cpu-float32"}
    finally:
        torch.set_default_dtype(before)


_CHOOSE_THEN_FORK = """
import os, signal, sys, torch
from everystep.replay.choose import _known, choose
kind = getattr(torch.optim, sys.argv[1])
torch.set_num_threads(2)
choose(kind([torch.nn.Parameter(torch.ones(3))]))
assert torch.get_num_threads() == 2
child = os.fork()
if not child:
    signal.alarm(60)
    _known.clear()
    torch.ones(1 << 20).sqrt()  # as a worker of the user's would, with threads
    choose(kind([torch.nn.Parameter(torch.ones(3))]))
    os._exit(0)
signal.alarm(30)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_fork_of_the_trainer_computes_and_chooses_too(kind: str) -> None:
    """Threads do not survive a fork, and whoever waits for them waits for ever: choosing starts none."""
    command = [sys.executable, "-c", _CHOOSE_THEN_FORK, kind]
    done = subprocess.run(command, start_new_session=True, timeout=120, check=False)
    assert done.returncode == 0, "the child hangs"


def test_a_twin_stands_for_the_code_that_it_was_compared_with() -> None:
    model = torch.nn.Linear(3, 2)
    live = take_census(model, torch.optim.SGD(model.parameters(), momentum=0.9))
    assert live.census.optimizers[0].twins and not live.groups_have_grown()
    live.optimizers[0].param_groups[0].update(lr=0.5, momentum=0.8)
    assert not live.groups_have_grown(), "values are logged with every call"
    live.optimizers[0].param_groups[0]["fused"] = True
    assert live.groups_have_grown(), "another kernel rounds differently"


def test_the_users_hooks_do_not_see_the_probe() -> None:
    seen: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], momentum=0.9)
    _known.clear()
    try:
        assert choose(optimizer).twins == {"float32": "sgd-cpu-float32"}
    finally:
        handle.remove()
    assert not seen


@pytest.mark.parametrize(("fused", "expected"), [(False, "ops"), (True, "fused")])
def test_between_equal_twins_the_kernels_own_is_taken(
    fused: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain SGD in bfloat16 rounds once either way; with decay, which may come later, it does not."""
    equal = {"sgd-fused-bfloat16": 0, "sgd-ops-bfloat16": 0}
    monkeypatch.setattr(choose_module, "differences", lambda *_: equal)
    monkeypatch.setattr(choose_module, "_unfit", lambda *_: "")
    _known.clear()
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    chosen = choose(torch.optim.SGD([parameter], fused=fused))
    _known.clear()
    assert chosen.twins == {"bfloat16": f"sgd-{expected}-bfloat16"}


def test_the_fused_kernel_of_the_cpu_is_left_to_torch() -> None:
    """It fuses multiply and add in the last elements of a tensor only: a short probe may miss that."""
    parameters = [torch.nn.Parameter(torch.ones(19))]
    assert choose(torch.optim.SGD(parameters, momentum=0.9, fused=True)).twins == {}
    assert choose(torch.optim.SGD(parameters, momentum=0.9)).twins == {"float32": "sgd-cpu-float32"}


def test_how_far_two_implementations_get_from_each_other() -> None:
    fused, plain = (partial(torch.optim.Adam, lr=1e-3, fused=f) for f in (True, False))
    cpu = torch.device("cpu")
    apart = drift(fused, plain, cpu, torch.float32, Probe(steps=20))
    assert 0 < apart < 1e-2, "they round differently, and little more"
    assert drift(plain, plain, cpu, torch.float32, Probe(steps=20)) == 0
