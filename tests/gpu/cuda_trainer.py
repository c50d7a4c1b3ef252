"""A small CUDA training, deterministic, that can kill itself in the middle of a step."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
from contextlib import nullcontext

import numpy as np
import torch

import everystep


def build(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler | None]:
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256, bias=False),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(256, 64, bias=False),
    ).cuda()
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), None
    if kind == "muon":
        return model, torch.optim.Muon(model.parameters(), lr=0.01), None
    fused = kind.endswith(("-fused", "-scaler"))
    family = torch.optim.AdamW if kind.startswith("adamw") else torch.optim.Adam
    optimizer = family(model.parameters(), lr=1e-3, fused=fused or None)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**18) if kind == "adamw-scaler" else None
    return model, optimizer, scaler


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.use_deterministic_algorithms(True)
    random.seed(1), np.random.seed(1)
    model, optimizer, scaler = build(job["kind"])
    losses: list[float] = []

    def step(index: int) -> None:
        noise = float(np.random.rand()) + random.random()
        x = torch.randn(32, 64, device="cuda") + noise
        with torch.autocast("cuda", torch.float16) if scaler else nullcontext():
            loss = (model(x) - x.flip(1)).pow(2).mean()
        if scaler:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer) if index % 2 else None
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if index == job["die_at"]:
            torch.cuda.synchronize()
            os.kill(os.getpid(), signal.SIGKILL)

    start, status = 0, {}
    if job["run"]:
        state = {"scaler": scaler} if scaler else {}
        with everystep.attach(model, optimizer, run=job["run"], state=state, every=1) as run:
            start = run.step
            for index in run.steps(job["steps"]):
                step(index)
            status = run.status()
    else:
        for index in range(job["steps"]):
            step(index)
    digest = hashlib.sha256()
    slots = [t for s in optimizer.state.values() for _, t in sorted(s.items())]
    for tensor in (*model.state_dict().values(), *slots):
        digest.update(tensor.cpu().numpy().tobytes())
    answer = {"start": start, "losses": losses, "digest": digest.hexdigest()}
    answer |= {k: status.get(k) for k in ("exactness", "resumed_from", "records_dropped")}
    print(json.dumps(answer))


main()
