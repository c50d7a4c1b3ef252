"""Steps inside steps: subclasses that call their base class, wrappers around another optimizer, steps that
need a closure or draw random numbers. The outermost call counts; what cannot be replayed is sent as state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from .harness import Job, check


class Shifted(optim.Adam):
    """Changes gradients, then lets its base class step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5).add_(0.1)
        result = super().step()  # an argument would be a reason of its own to send state
        if self.param_groups[0]["fails"]:
            raise ArithmeticError
        return result


class Lookahead(optim.Optimizer):
    """Steps another optimizer; every other time the weights go half the way back to where they were."""

    def __init__(self, base: optim.Optimizer) -> None:
        super().__init__([p for g in base.param_groups for p in g["params"]], {})
        self.base = base

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                state["count"] = state.get("count", 0) + 1
                if state["count"] % 2 == 0:
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)
        return loss


class Sharpness(optim.Optimizer):
    """Evaluates its closure at other weights, after it has used the gradients from before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    def step(self, closure: Any = None) -> Any:
        parameters = [p for g in self.param_groups for p in g["params"]]
        moves = [0.1 * p.grad for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, moves)
            self.zero_grad()
        loss = closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
            for parameter in parameters:
                parameter.sub_(parameter.grad, alpha=0.05)
        return loss


class Noisy(optim.Optimizer):
    """Draws random numbers while it steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = torch.randn_like(parameter)
                parameter.sub_(parameter.grad + 0.1 * noise, alpha=group["lr"])


def trained(model: nn.Module, optimizers: dict[str, Any], step: Callable[[Any], Any]) -> Job:
    def turn(number: int) -> Any:
        x = torch.randn(4, 5)

        def closure() -> Any:
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        loss = closure()
        step(closure)
        return loss.detach()

    return Job(model, optimizers, turn)


def subclass() -> Job:
    """torch hooks the step of the base class too as soon as a plain one exists."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    shifted = Shifted(model[0].parameters(), lr=0.02)
    plain = optim.Adam(model[1].parameters(), lr=0.01)
    shifted.param_groups[0]["fails"] = False

    def step(closure: Any) -> None:
        shifted.step()
        plain.step()

    return trained(model, {"shifted": shifted, "plain": plain}, step)


def subclass_that_raises() -> Job:
    """The next step is not inside one that raised, and what that one did to the weights is an edit."""
    job = subclass()
    step_and_more = job.turn

    def turn(number: int) -> Any:
        job.optimizer["shifted"].param_groups[0]["fails"] = number == 1
        with contextlib.suppress(ArithmeticError):
            return step_and_more(number)

    job.turn = turn
    return job


def wrapper() -> Job:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    base = optim.AdamW(model.parameters(), lr=0.02)
    lookahead = Lookahead(base)
    return trained(model, {"base": base, "lookahead": lookahead}, lambda _: lookahead.step())


def shared() -> Job:
    """One of them only the user's code can replay, the other the shadow could: they move the same tensor."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    shifted = Shifted(model.parameters(), lr=0.02)
    plain = optim.SGD([model[0].weight], lr=0.05)
    shifted.param_groups[0]["fails"] = False

    def step(closure: Any) -> None:
        shifted.step()
        plain.step()

    return trained(model, {"shifted": shifted, "plain": plain}, step)


def subclass_with_a_hook() -> Job:
    """The hook also runs inside, where the base class steps, and remembers what it did."""
    job = subclass()
    parameters = [*job.model[0].parameters()]
    last = {str(i): torch.zeros_like(p).detach() for i, p in enumerate(parameters)}

    def smooth(*_: Any) -> None:
        for i, parameter in enumerate(parameters):
            parameter.grad.add_(last[str(i)], alpha=0.5)
            last[str(i)] = parameter.grad.clone()

    job.optimizer["shifted"].register_step_pre_hook(smooth)
    job.state = {"last": last}
    return job


def with_closure() -> Job:
    model = nn.Linear(5, 3)
    optimizer = Sharpness(model.parameters())
    return trained(model, {"": optimizer}, lambda closure: optimizer.step(closure))


def noisy() -> Job:
    model = nn.Linear(5, 3)
    optimizer = Noisy(model.parameters())
    return trained(model, {"": optimizer}, lambda _: optimizer.step())


JOBS = {
    "subclass": subclass,
    "subclass_that_raises": subclass_that_raises,
    "subclass_with_a_hook": subclass_with_a_hook,
    "wrapper": wrapper,
    "shared": shared,
    "with_closure": with_closure,
    "noisy": noisy,
}


@pytest.mark.parametrize("source", ["shadow", "store"])
@pytest.mark.parametrize("name", JOBS)
def test_the_outermost_call_counts(tmp_path: Path, name: str, source: str) -> None:
    options = {"durable_log": 1, "durable_every": "1h"} if source == "store" else {}
    check(JOBS[name], tmp_path, die_at=(2, 4), source=source, **options)
