"""Objects of any kind at any place of a training: they come back exactly, or attach refuses them by path.
Nothing between: no other exception, no value that comes back as something else."""

from __future__ import annotations

import io
import os
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.masked import masked_tensor

from everystep.capture.state import UserState
from everystep.errors import UsageError

from .compare import freeze, same
from .desk import Desk, load
from .harness import SEED, Job

PROGRAMS = int(os.environ.get("EVERYSTEP_PROGRAMS", "150"))


class Own(torch.Tensor):
    """A subclass whose elements are plain memory."""


def loop() -> Any:
    found: list[Any] = [1]
    found.append({"again": found})
    return found


def deep() -> Any:
    found: Any = 1
    for _ in range(99):
        found = [found]
    return found


def record(align: bool) -> Any:
    return np.ones(2, np.dtype([("a", "i1"), (("title", "b"), ">f8", (2,))], align=align))


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(2, 3),
    "scalar": lambda: torch.tensor(0.25),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.randn(2, 3).t(),
    "expanded": lambda: torch.randn(1, 3).expand(2, 3),
    "strided": lambda: torch.arange(9)[::2],
    "byte": lambda: torch.tensor([True, False]),
    "eight": lambda: torch.randn(3).to(torch.float8_e5m2),
    "unsigned": lambda: torch.tensor([1, 2], dtype=torch.uint64),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "wide": lambda: torch.zeros(2, dtype=torch.complex128),
    "meta": lambda: torch.zeros(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "rows": lambda: torch.eye(2).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8),
    "jagged": lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2)]),
    "masked": lambda: masked_tensor(torch.zeros(2), torch.ones(2, dtype=torch.bool)),
    "own": lambda: torch.randn(2).as_subclass(Own),
    "lazy": lambda: nn.UninitializedParameter(),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "float": lambda: -0.0,
    "huge": lambda: -(1 << 200),
    "surrogate": lambda: "a\ud800",
    "bytes": lambda: b"\0\xff",
    "complex": lambda: 1 - 0.0j,
    "range": lambda: range(3, 1 << 80, 7),
    "ordered": lambda: OrderedDict(b=1, a=[2]),
    "counter": lambda: Counter("abca"),
    "deque": lambda: deque([1, (2,)], maxlen=5),
    "frozen": lambda: frozenset([1]),
    "keys": lambda: {(1, "a"): 1, None: 2, 1.5: 3, b"x": 4, np.int8(5): 5, "\ud800": 6},
    "array": lambda: np.arange(6, dtype=">i2").reshape(2, 3),
    "fortran": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "point": lambda: np.array(7),
    "hollow": lambda: np.zeros((2, 0), "M8[ns]"),
    "strings": lambda: np.array(["é", "longer"]),
    "packed": lambda: record(False),
    "aligned": lambda: record(True),
    "void": lambda: record(True)[0],
    "text": lambda: np.str_("a\0"),
    "date": lambda: np.datetime64("2024-02-29"),
    "size": lambda: torch.Size([2, 3]),
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cpu"),
    "loop": loop,
    "deep": deep,
    "object": object,
    "function": lambda: print,
    "module": lambda: nn.Linear(1, 1),
    "file": io.BytesIO,
    "decimal": lambda: Decimal("1.5"),
    "path": lambda: Path("x"),
    "default": lambda: defaultdict(list),
    "objects": lambda: np.array([object()]),
    "matrix": lambda: np.matrix([[1]]),
    "masked": lambda: np.ma.array([1]),
    "generator": lambda: np.random.default_rng(0),
    "state": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
    "torch": torch.Generator,
    "key": lambda: {torch.zeros(2): 1},
}


class Handmade(optim.SGD):
    """Not torch's own: its attributes are state."""


def wrap(draw: random.Random, value: Any) -> Any:
    """Some containers around it."""
    for _ in range(draw.choice([0, 0, 1, 2])):
        value = draw.choice([lambda v: [0, v], lambda v: {"k": v}, lambda v: (v, 1)])(value)
    return value


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"inner": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["inner"]


def build() -> Job:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = Handmade(model.parameters(), lr=0.1)
    return Job(model, optimizer, lambda step: None, {"s": {}, "o": Stateful(None)})


def put(job: Job, place: str, value: Any) -> str:
    """Put it there; returns how a refusal names the place."""
    optimizer, weight = job.optimizer, job.model[0].weight
    if place == "buffer":
        job.model[0].register_buffer("odd", value)
        return "'0.odd'"
    if place == "parameter":
        job.model[0].odd = value if isinstance(value, nn.Parameter) else _parameter(value)
        return "'0.odd'"
    if place == "state":
        job.state["s"]["x"] = value
        return "state['s']['x']"
    if place == "object":
        job.state["o"].state = value
        return "state['o']['inner']"
    if place == "group":
        optimizer.param_groups[0]["odd"] = value
        return "optimizer[''].param_groups[0]['odd']"
    if place == "slot":
        optimizer.state[weight]["odd"] = value
        return "optimizer[''].state['0.weight']['odd']"
    if place == "slots":
        optimizer.state[weight] = value
        return "optimizer[''].state['0.weight']"
    if place == "key":
        optimizer.state["odd"] = value
        return "optimizer[''].state['odd']"
    assert place == "attribute"
    optimizer.odd = value
    return "never refused"


def _parameter(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def scramble(job: Job, place: str, value: Any) -> None:
    """A place for it that holds something else."""
    if place in ("buffer", "parameter"):
        put(job, place, torch.empty_strided(value.shape, value.stride(), dtype=value.dtype))
    elif place == "slots":
        job.optimizer.state[job.model[0].weight] = {"other": 1}
    else:
        put(job, place, draw_other(value))


def draw_other(value: Any) -> Any:
    return [] if isinstance(value, dict) else {}


def seen(job: Job) -> Any:
    model, optimizer = job.model, job.optimizer
    state = [v for _, v in optimizer.state.items()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    user = [job.state["s"], job.state["o"].state]
    return freeze([*model.parameters(), *model.buffers(), groups, state, user])


PLACES = ["buffer", "parameter", "state", "object", "group", "slot", "slots", "key", "attribute"]


def one(seed: int, pool: Any = None, name: str = "") -> str:
    """Returns what became of it, for the statistics. Without a name any value is drawn."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    place = draw.choice(PLACES[2:] if name else PLACES)
    if not name:
        pool = TENSORS if place in ("buffer", "parameter") or draw.random() < 0.4 else OTHERS
        name = draw.choice(list(pool))
    value = pool[name]()
    if place not in ("buffer", "parameter"):
        value = wrap(draw, value)
    job = build()
    told = f"seed {seed}: {name} as {place}"
    try:
        path = put(job, place, value)
    except (RuntimeError, TypeError):
        return "torch refuses it"
    try:
        UserState(job.state).collect()
        desk = Desk(job)
    except UsageError as refusal:
        assert path in str(refusal) and refusal.hint, f"{told}: {refusal}"
        return "refused"
    fresh = build()
    scramble(fresh, place, value)
    found = load(desk.base(), lambda: fresh)
    same(seen(job), seen(found), told)
    there = found.optimizer.odd if place == "attribute" else value
    if type(there) not in (list, dict) or there:  # otherwise it is code, and was left as it was
        same(freeze(value), freeze(there), told)
    desk.close()
    return "came back"


@pytest.mark.filterwarnings("ignore")
def test_exact_or_refused_by_path() -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = Counter(one(SEED + number) for number in range(PROGRAMS))
    print(ends)
    assert ends["refused"] > PROGRAMS / 8 and ends["came back"] > PROGRAMS / 8, ends


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pool", [TENSORS, OTHERS], ids=["tensors", "others"])
def test_every_kind_at_some_place(pool: dict[str, Any]) -> None:
    """Drawing alone never meets some of them."""
    for number, name in enumerate(pool):
        one(SEED + number, pool, name)
