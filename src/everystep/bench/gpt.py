"""A GPT of a named size and its training step, for measurements. Tokens are random: only time counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from everystep.bench.chargpt import CharGPT
from everystep.errors import UsageError


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int


SIZES = {
    "gpt-tiny": Size(4, 256, 4, 128, 1024),
    "gpt-124m": Size(12, 768, 12, 1024, 50257),
    "gpt-350m": Size(24, 1024, 16, 1024, 50257),
    "gpt-1.3b": Size(24, 2048, 16, 1024, 50257),
}


class Training:
    """Model, optimizer and one step. Owned by the thread that measures."""

    def __init__(self, name: str, batch: int, optimizer: str, *, compiled: bool) -> None:
        if name not in SIZES:
            raise UsageError(f"bench: no model {name!r}", hint=f"one of {', '.join(SIZES)}")
        self.size = SIZES[name]
        self.batch = batch
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(1)
        size = self.size._asdict()
        with self.device:  # a large model is made where it lives
            self.model = CharGPT(size.pop("vocabulary"), **size, dropout=0.0, tied=False)
        self.forward = torch.compile(self.model) if compiled else self.model
        self.optimizer = _optimizer(optimizer, self.model)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        shape = (batch, self.size.context + 1)
        self._tokens = torch.randint(self.size.vocabulary, shape, device=self.device)

    def step(self) -> None:
        inputs, targets = self._tokens[:, :-1], self._tokens[:, 1:]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.forward(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """Weights, buffers and what the optimizer keeps, always in the same order."""
        state = self.optimizer.state
        moved = (p for group in self.optimizer.param_groups for p in group["params"])
        slots = (value for p in moved for _, value in sorted(state[p].items()))
        everything = (*self.model.state_dict().values(), *slots)
        return [t.detach() for t in everything if torch.is_tensor(t)]

    def state(self) -> dict[str, object]:
        # a plain dict: the stager of some versions of torch cannot copy the metadata of a state_dict
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()}


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    build = _OPTIMIZERS.get(name)
    if build is None:
        raise UsageError(f"bench: no optimizer {name!r}", hint=f"one of {', '.join(_OPTIMIZERS)}")
    return build(model.parameters())


_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-4),
    "adam-fused": partial(torch.optim.Adam, lr=1e-4, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-4),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-4, fused=True),
}
