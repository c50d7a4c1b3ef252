"""One training of the demo, in a process of its own: `python -m everystep.bench.demo_trainer`.

Every finished optimizer step is logged at once, so that whoever kills us knows how far we were.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch.nn import functional

import everystep
from everystep.bench.chargpt import CharGPT, Text
from everystep.replay.tensors import raw_bytes

BATCH, CONTEXT = 16, 128


class Job(msgspec.Struct, frozen=True):
    method: str  # none | everystep | torch.save
    folder: str
    steps: int
    log: str
    turn: int = 0  # steps until it waits for a byte on its standard input; 0: it never waits


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the log: a beginning, waiting for a turn, its start, a finished step, or the end."""

    kind: str  # begin | wait | go | step | end
    step: int
    time: float
    loss: str = ""
    digest: str = ""


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def say(kind: str, step: int, **more: str) -> None:
        os.write(log, msgspec.json.encode(Line(kind, step, time.time(), **more)) + b"\n")

    # with more threads torch's own results differ in the last bit once in a while
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    text = Text()
    model = CharGPT(text.vocabulary, width=128, layers=4, heads=4, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, job.steps)
    with _steps(job, model, optimizer, schedule) as steps:
        first = True
        for step in steps:
            if job.turn and step % job.turn == 0:
                say("wait", step)
                if not os.read(0, 1):
                    sys.exit("demo: nobody gives turns any more")
                say("go", step)
            if first:
                say("begin", step)
                first = False
            tokens, targets = text.batch(BATCH, CONTEXT)
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            say("step", step, loss=float(loss.detach()).hex())
            optimizer.zero_grad()
            schedule.step()
        say("wait", job.steps)
    say("end", job.steps, digest=_digest(model, optimizer))


@contextmanager
def _steps(
    job: Job,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Iterator[Iterator[int]]:
    if job.method == "everystep":
        with everystep.attach(
            model,
            optimizer,
            run=Path(job.folder) / "run",
            state={"schedule": schedule},
            # a demo that was given up leaves nothing behind
            tuning=everystep.Tuning(idle_exit="1m"),
        ) as run:
            yield run.steps(job.steps)
    elif job.method == "torch.save":
        yield _saving(job, model, optimizer, schedule)
    else:
        yield iter(range(job.steps))


def _saving(
    job: Job,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> Iterator[int]:
    """What people do today: everything into one file, every step, renamed into place."""
    path = Path(job.folder) / "checkpoint.pt"
    for step in range(job.steps):
        yield step
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def _digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of weights and optimizer state."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(raw_bytes(tensor))
    for index, slots in optimizer.state_dict()["state"].items():
        for name in sorted(slots):
            digest.update(f"{index}{name}".encode())
            digest.update(raw_bytes(slots[name]))
    return digest.hexdigest()


if __name__ == "__main__":
    main()
