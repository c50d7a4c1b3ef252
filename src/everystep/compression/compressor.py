"""`everystep.compress`: gradients say less from here on, to the optimizer, to other ranks and to the log.

With feedback, what a step left unsaid is added to the next gradient. These residuals belong to the state of
training: they go to the shadow with every step and into every base, but not into the log, which would lose by
them what compression won.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from everystep.compression.methods import FP8, INT8, Bfloat16, Method, RandomK, TopK
from everystep.errors import UsageError

_SPARSE: dict[str, Callable[[float], Method]] = {"topk": TopK, "randomk": RandomK}
_DENSE: dict[str, Method] = {"int8": INT8, "fp8": FP8, "bf16": Bfloat16()}
_known: weakref.WeakKeyDictionary[Any, Compressor] = weakref.WeakKeyDictionary()


def compress(
    target: torch.optim.Optimizer | DistributedDataParallel,
    method: str,
    *,
    ratio: float = 0.01,
    feedback: bool = False,
    rank: int = 1,
) -> None:
    """Compress the gradients of an optimizer before each of its steps, or those that DDP communicates.

    `method` is topk, randomk (both keep the share `ratio`), int8, fp8, bf16, or for DDP also powersgd
    (of `rank`). Call it before `attach`.
    """
    if target in _known:
        raise UsageError(f"compress: this {type(target).__name__} is compressed already")
    if method == "powersgd":
        from everystep.compression.ddp import use_powersgd

        use_powersgd(target, rank)
        _known[target] = Compressor(None, f"powersgd of rank {rank}", [])
        return
    compressor = Compressor(
        _method(method, ratio),
        f"{method} {ratio:g}" if method in _SPARSE else method,
        _parameters(target) if feedback else [],
    )
    _known[target] = compressor
    if isinstance(target, torch.optim.Optimizer):
        target.register_step_pre_hook(compressor.before_step)
    else:
        from everystep.compression.ddp import communicate

        # DDP compares annotations with types, and ours are text
        target.register_comm_hook(compressor, lambda state, bucket: communicate(state, bucket))


class Compressor:
    """Owned by the training thread, or by DDP's during backward."""

    def __init__(
        self, method: Method | None, name: str, parameters: Iterable[torch.nn.Parameter]
    ) -> None:
        self.method = method
        self.name = name
        self.residuals = {p: torch.zeros_like(p, requires_grad=False) for p in parameters}

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        assert self.method is not None
        if self.residuals and getattr(optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "compress: feedback and a GradScaler that the fused step unscales by itself",
                hint="call scaler.unscale_(optimizer) before scaler.step, or build it without fused=True",
            )
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._reduce(self.method, parameter, parameter.grad)

    def _reduce(
        self, method: Method, parameter: torch.nn.Parameter, gradient: torch.Tensor
    ) -> None:
        if gradient.layout is not torch.strided:
            raise UsageError("compress: a sparse gradient", hint="it says little enough as it is")
        residual = self.residuals.get(parameter)
        if residual is not None:
            gradient += residual
        flat = gradient.reshape(-1)
        kept = method.decode(method.encode(flat), len(flat), flat.dtype).view_as(gradient)
        if residual is not None:
            torch.sub(gradient, kept, out=residual)
        gradient.copy_(kept)


def residuals_of(targets: Iterable[Any]) -> dict[torch.nn.Parameter, torch.Tensor]:
    """What compressed optimizers and models hold back, by parameter."""
    compressors = [_known[target] for target in targets if target in _known]
    return {p: residual for c in compressors for p, residual in c.residuals.items()}


def names_of(targets: Iterable[Any]) -> list[str]:
    """How gradients are compressed, in words."""
    compressors = [_known[target] for target in targets if target in _known]
    return [f"{c.name}{', with feedback' if c.residuals else ''}" for c in compressors]


def _method(name: str, ratio: float) -> Method:
    if name in _SPARSE:
        if not 0 < ratio <= 1:
            raise UsageError(f"compress: ratio {ratio}, expected more than 0 and at most 1")
        return _SPARSE[name](ratio)
    if name not in _DENSE:
        raise UsageError(
            f"compress: no method {name!r}",
            hint=f"one of {', '.join([*_SPARSE, *_DENSE, 'powersgd'])}",
        )
    return _DENSE[name]


def _parameters(target: torch.optim.Optimizer | DistributedDataParallel) -> list[Any]:
    if isinstance(target, torch.optim.Optimizer):
        return [p for group in target.param_groups for p in group["params"]]
    return [p for p in target.parameters() if p.requires_grad]
