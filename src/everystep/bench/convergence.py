"""`everystep bench convergence`: the demo's character GPT, trained with every way to compress gradients."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import everystep
from everystep.bench.chargpt import CharGPT, Text

_BATCH, _CONTEXT = 16, 128
_TAIL = 20  # steps whose mean is the loss at the end
WAYS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "bf16": {"method": "bf16"},
    "int8": {"method": "int8"},
    "fp8": {"method": "fp8"},
    "topk 10 %": {"method": "topk", "ratio": 0.1},
    "topk 1 %": {"method": "topk", "ratio": 0.01},
    "topk 1 %, feedback": {"method": "topk", "ratio": 0.01, "feedback": True},
    "randomk 1 %": {"method": "randomk", "ratio": 0.01},
    "randomk 1 %, feedback": {"method": "randomk", "ratio": 0.01, "feedback": True},
}


def convergence(steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Losses of every way, from the same weights over the same text."""
    losses = {}
    for name, way in WAYS.items():
        losses[name] = _train(steps, way)
        say(f"{name:>22}: {_end(losses[name]):.4f}")
    end = {name: _end(found) for name, found in losses.items()}
    return {"steps": steps, "loss_at_the_end": end, "losses": losses}


def _end(losses: list[float]) -> float:
    return statistics.mean(losses[-_TAIL:])


def _train(steps: int, way: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(1234)
    text = Text()
    model = CharGPT(text.vocabulary, width=128, layers=4, heads=4, context=_CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    if way is not None:
        everystep.compress(optimizer, **way)
    batches = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        # random-k draws too: every way must see the same text
        state = torch.get_rng_state()
        torch.manual_seed(int(torch.randint(1 << 31, (), generator=batches)))
        tokens, targets = text.batch(_BATCH, _CONTEXT)
        torch.set_rng_state(state)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses
