"""`everystep bench replay`: how fast steps are replayed here, by the twins and by torch, in one run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from everystep.core.pace import replay_threads
from everystep.errors import UsageError
from everystep.native import TARGET, missing
from everystep.replay.passes import Rows, Step, run_pass
from everystep.replay.twins import TWINS, Twin

_RECORDS = (1, 2, 4, 8)
_ROUNDS = 3
_ADAM = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}
_SGD = {
    "lr": 1e-3,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "maximize": False,
}
_SHOWN = {  # the twins of the README's table, by the names that it uses
    "adamw": "adam-fused-float32",
    "adamw_foreach": "adam-foreach-float32",
    "adamw_bfloat16": "adam-fused-bfloat16",
    "sgd": "sgd-ops-float32",
}


def replay_speed(parameters: int, threads: int | None) -> dict[str, Any]:
    """Parameters moved in a second, in billions, for k records in one pass over the state."""
    if (absent := missing()) is not None:
        raise UsageError(f"bench replay: {absent.why}", hint=absent.remedy)
    threads = threads or replay_threads(len(os.sched_getaffinity(0)))
    torch.set_num_threads(threads)
    source = torch.Generator().manual_seed(1)
    gradients = [torch.randn(parameters, generator=source) * 1e-3 for _ in range(max(_RECORDS))]
    found: dict[str, Any] = {
        "parameters": parameters,
        "threads": threads,
        "memory_bytes_per_second": _memory_rate(threads),
        "torch_fused": _torch(parameters, gradients[0], fused=True),
        "torch_foreach": _torch(parameters, gradients[0], foreach=True),
    }
    for shown, name in _SHOWN.items():
        twin = TWINS[name]
        own = [gradient.to(getattr(torch, twin.dtype)) for gradient in gradients]
        rates = {str(k): _twin(twin, own[:k], threads) for k in _RECORDS}
        found[shown] = rates
        found[f"{shown}_bytes"] = {k: _bytes(twin, int(k)) for k in rates}
        found[f"{shown}_memory_share"] = {
            k: rate * 1e9 * _bytes(twin, int(k)) / found["memory_bytes_per_second"]
            for k, rate in rates.items()
        }
    return found


def _bytes(twin: Twin, k: int) -> float:
    """For a parameter and a step: the gradient is read once, state is read and written once a pass."""
    size = 4 if twin.dtype == "float32" else 2
    states = 1 + len(twin.rule.slots_of(_ADAM if twin.rule.counts_steps else _SGD))
    return size * (1 + 2 * states / k)


def _twin(twin: Twin, gradients: list[torch.Tensor], threads: int) -> float:
    group = _ADAM if twin.rule.counts_steps else _SGD
    count = gradients[0].numel()
    state = [torch.zeros(count, dtype=gradients[0].dtype) for _ in range(1 + len(twin.rule.slots))]
    targets = np.zeros(1, TARGET)
    used = 1 + len(twin.rule.slots_of(group))
    targets[0]["value"], targets[0]["count"] = state[0].data_ptr(), count
    targets[0]["slots"][: used - 1] = [slot.data_ptr() for slot in state[1:used]]
    zero = np.zeros(1, np.int64)
    rows = Rows(targets, zero, zero.copy(), zero == 0)
    powers = {float(np.float32(beta)): np.zeros(0, np.float32) for beta in (0.9, 0.999)}
    steps = [Step(np.array([g.data_ptr()], np.uint64), [group]) for g in gradients]
    seconds = _best(lambda: run_pass(twin, rows, steps, powers, threads))
    return len(gradients) * count / seconds / 1e9


def _torch(count: int, gradient: torch.Tensor, **how: Any) -> float:
    parameter = torch.nn.Parameter(torch.zeros(count))
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], **how)
    return count / _best(optimizer.step) / 1e9


def _memory_rate(threads: int) -> float:
    """Bytes read and written while memory is copied; what is written is read first."""
    source, target = (torch.ones(64 << 20) for _ in range(2))
    return 3 * source.nbytes / _best(lambda: target.copy_(source))


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
