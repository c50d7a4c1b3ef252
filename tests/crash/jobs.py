"""Small trainings that draw from every random source, in a process that may be killed at any instant.

The same function trains with and without everystep, so an unbroken run is the reference. What it did
is appended to a journal with one write per line: a killed process leaves whole lines.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

import everystep

WIDTH = 48
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=1e-3),
    "everything": lambda p: torch.optim.AdamW(p, lr=2e-3),
}


class Everything(nn.Module):
    """BatchNorm, dropout, tied weights and a parameter that often gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.sometimes = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return y + self.sometimes if random.random() < 0.3 else y


class Loader:
    """A data loader with a place of its own."""

    def __init__(self) -> None:
        self.place = 0

    def batch(self) -> torch.Tensor:
        self.place += 1
        own = torch.Generator().manual_seed(self.place)
        return torch.randn(16, WIDTH, generator=own) + 0.01 * torch.randn(16, WIDTH)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Job:
    def __init__(self, name: str) -> None:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        plain = [nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, WIDTH)]
        self.model = Everything() if name == "everything" else nn.Sequential(*plain)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.loader = Loader()
        schedulers = torch.optim.lr_scheduler
        self.scheduler = schedulers.CosineAnnealingWarmRestarts(self.optimizer, 11, eta_min=1e-4)
        self.skipped = False
        self.state: dict[str, Any] = {"loader": self.loader, "scheduler": self.scheduler}
        self.scaler = None
        if name == "everything":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
            self.state["scaler"] = self.scaler

    def step(self) -> float:
        """One training step; with a scaler every few are skipped because a gradient is infinite."""
        batch = self.loader.batch() * float(np.random.uniform(0.9, 1.1))
        loss = (self.model(batch) - batch).square().mean()
        if self.scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        else:
            # not while the scale is small: it would go to zero, and everything with it to NaN
            self.skipped = random.random() < 0.2 and self.scaler.get_scale() > 64
            infinite = torch.tensor(float("inf") if self.skipped else 1.0)
            self.scaler.scale(loss * infinite).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def digest(self) -> str:
        """Weights, buffers and optimizer state, bit for bit."""
        digest = xxhash.xxh3_64()
        state = {"m": self.model.state_dict(), "o": self.optimizer.state_dict()}
        for key, value in sorted(_flat(state), key=lambda item: item[0]):
            digest.update(key.encode())
            is_tensor = isinstance(value, torch.Tensor)
            digest.update(value.numpy().tobytes() if is_tensor else repr(value).encode())
        return digest.hexdigest()

    def final(self) -> dict[str, Any]:
        """Everything that must be as in an unbroken run, also what the next draws would be."""
        scalers = self.scaler.state_dict() if self.scaler else None
        return {
            "digest": self.digest(),
            "scaler": scalers,
            "scheduler": repr(sorted(self.scheduler.state_dict().items())),
            "place": self.loader.place,
            "random": [random.random(), float(np.random.rand()), torch.rand(1).item()],
        }


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from _flat(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _flat(item, f"{path}.{i}")
    else:
        yield path, value


class Journal:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: Any) -> None:
        os.write(self._fd, (json.dumps({"kind": kind, **fields}) + "\n").encode())


def read_journal(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def train(name: str, total: int, journal: Path, run: Path | None = None, **options: Any) -> Job:
    """Train to `total` steps and journal every one; without `run` nothing of everystep is used."""
    job, out = Job(name), Journal(journal)
    pause = options.pop("pause_seconds", 0.0)
    stop_file = options.pop("stop_file", None)

    def one(step: int) -> None:
        loss = job.step()
        out.write("step", step=step + 1, loss=loss.hex(), digest=job.digest())
        time.sleep(pause)

    if run is None:
        for step in range(total):
            one(step)
        out.write("final", **job.final())
        return job
    given = {"every": 1, **{name: _group(name, value) for name, value in options.items()}}
    with everystep.attach(job.model, job.optimizer, run=run, state=job.state, **given) as live:
        out.write("resumed", step=live.step, source=live.status()["resumed_from"])
        for step in live.steps(total):
            one(step)
            stopping = stop_file is not None and Path(stop_file).exists()
            # not at a step without an optimizer call: it would be left to be done again
            if stopping and not job.skipped and _is_well(live, stop_file):
                break
        status = live.status()
        out.write("status", dropped=status["records_dropped"], health=status["health"])
    out.write("final", **job.final())
    return job


def _group(name: str, value: Any) -> Any:
    """Options that are given together travel as what they hold."""
    kinds = {"keep": everystep.Keep, "tuning": everystep.Tuning}
    return kinds[name](**value) if name in kinds else value


def _is_well(live: everystep.Run, asked_to_stop: Path) -> bool:
    """A shadow that was lost a moment ago is given a minute of steps to come back: seals bring it."""
    waited = time.time() - Path(asked_to_stop).stat().st_mtime
    return live.status()["health"] == "ok" or waited > 60
