"""A user's script: optimizers that exist in its `__main__` alone, with state of unusual kinds.

Run as `python own_optimizers.py RUN OUT die|resume|reference`.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

TOTAL, DIED = 6, 3


class Replacing(torch.optim.Optimizer):
    """Makes new state tensors at every step instead of writing into the old ones."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
                state["norm"] = state["m"].norm()
                p.sub_(group["lr"] * state["m"] / (1 + state["norm"]))


class Counting(torch.optim.Optimizer):
    """Keeps python numbers, lists and a string, all of which its steps depend on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["decay"] = state.get("decay", 1.0) * 0.9
                state.setdefault("past", []).append(float(p.grad.abs().mean()))
                state["last"] = ("odd", "even")[state["count"] % 2 == 0]
                scale = state["decay"] * sum(state["past"]) / state["count"]
                p.sub_(p.grad, alpha=group["lr"] * scale)


class Borrowed(torch.optim.AdamW):
    """Somebody's AdamW: derived from torch's, and not the same."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sign_().mul_(0.5).add_(0.1)
        return super().step(closure)


def build() -> Any:
    from exact.harness import Job

    models = {name: nn.Linear(5, 3) for name in ("replacing", "counting", "borrowed")}
    kinds = {"replacing": Replacing, "counting": Counting, "borrowed": Borrowed}
    optimizers = {n: kinds[n](model.parameters(), lr=0.1) for n, model in models.items()}

    def turn(step: int) -> Any:
        x = torch.randn(4, 5)
        loss = sum(model(x).square().mean() for model in models.values())
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Job(models, optimizers, turn)


if __name__ == "__main__":
    from exact import harness

    run, out, role = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if role == "die":
        home = harness.os.environ["EVERYSTEP_RUNTIME_DIR"]
        harness._doomed(build, run, home, DIED, harness.SEED, len(sys.argv) > 4, {})
    elif role == "reference":
        out.write_bytes(pickle.dumps(harness.unbroken(build, TOTAL)))
    else:
        outcome = harness.resume(build, run, TOTAL, seed=harness.SEED + 1)
        out.write_bytes(pickle.dumps(outcome))
        end = harness.unbroken(build, TOTAL)[2]
        harness._check_store(build, run, TOTAL, end)
