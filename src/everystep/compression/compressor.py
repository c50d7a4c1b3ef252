"""`everystep.compress`: gradients say less from here on, to the optimizer, to other ranks and to the log.

With feedback, what a step left unsaid is added to the next gradient. These residuals belong to the state of
training: they go to the shadow with every step and into every base, but not into the log, which would lose by
them what compression won.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from everystep.closures import closure_in, with_work_after
from everystep.compression.methods import FP8, INT8, Bfloat16, Method, RandomK, TopK
from everystep.errors import UsageError
from everystep.unwrap import unwrap

_SPARSE: dict[str, Callable[[float], Method]] = {"topk": TopK, "randomk": RandomK}
_DENSE: dict[str, Method] = {"int8": INT8, "fp8": FP8, "bf16": Bfloat16()}
_BUCKET_BYTES = 64 << 20
_UNLOGGED = "the log does not hold its residuals, bases do"
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
    (of `rank`). Parameters of a bucket (64 MiB, or DDP's) compete for what topk keeps. Call it before
    `attach`.
    """
    target = unwrap(target)
    parameters = _parameters(target)
    if method == "powersgd":
        from everystep.compression.ddp import use_powersgd

        use_powersgd(target, rank)
        _known[target] = Compressor(None, f"powersgd of rank {rank}", parameters, feedback=False)
        return
    name = f"{method} {ratio:g}" if method in _SPARSE else method
    compressor = Compressor(_method(method, ratio), name, parameters, feedback=feedback)
    if isinstance(target, torch.optim.Optimizer):
        target.register_step_pre_hook(compressor.before_step)
    else:
        from everystep.compression.ddp import communicate

        # DDP compares annotations with types, and ours are text
        target.register_comm_hook(compressor, lambda state, bucket: communicate(state, bucket))
    _known[target] = compressor


class Compressor:
    """Owned by the training thread, or by DDP's during backward."""

    def __init__(
        self,
        method: Method | None,
        name: str,
        parameters: list[torch.nn.Parameter],
        *,
        feedback: bool,
    ) -> None:
        self.method = method
        self.name = f"{name}, with feedback" if feedback else name
        self.parameters = parameters
        self.feedback = feedback
        self.residuals: dict[torch.nn.Parameter, torch.Tensor] = {}
        for parameter in parameters:
            self.residual(parameter)

    def residual(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """What was left unsaid of a parameter; one that came later begins with nothing."""
        if not self.feedback:
            return None
        if parameter not in self.residuals:
            self.residuals[parameter] = torch.zeros_like(parameter, requires_grad=False)
        return self.residuals[parameter]

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A pre-hook: now, or where a closure makes the gradients, when it has."""
        closure = closure_in(args, kwargs)
        if closure is None:
            self._reduce_all(optimizer)
            return None
        return with_work_after(closure, partial(self._reduce_all, optimizer), args, kwargs)

    def _reduce_all(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.method is not None
        if self.feedback and getattr(optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "compress: feedback and a GradScaler that the fused step unscales by itself",
                hint="call scaler.unscale_(optimizer) before scaler.step, or build it without fused=True",
            )
        skipped = getattr(optimizer, "found_inf", None)  # then the fused kernel does nothing
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        with torch.no_grad():
            for bucket in _buckets(parameters):
                self._reduce(self.method, bucket, skipped)

    def _reduce(
        self,
        method: Method,
        parameters: list[torch.nn.Parameter],
        skipped: torch.Tensor | None,
    ) -> None:
        gradients = [_gradient(parameter) for parameter in parameters]
        residuals = [r for p in parameters if (r := self.residual(p)) is not None]
        if residuals:
            torch._foreach_add_(gradients, residuals)
        flat = torch.cat([_padded(gradient, method.block) for gradient in gradients])
        kept = method.decode(method.encode(flat), len(flat), flat.dtype)
        torch._foreach_copy_(gradients, _pieces(kept, gradients, method.block))
        if residuals:
            unsaid = _pieces(flat - kept, gradients, method.block)
            keep_residuals(residuals, unsaid, flat.isfinite().all(), skipped)


def _buckets(parameters: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Compressed together, as DDP does it: a few large kernels, not hundreds of small ones."""
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        first = bucket[0] if bucket else parameter
        alike = (first.dtype, first.device) == (parameter.dtype, parameter.device)
        if not alike or size + parameter.nbytes > _BUCKET_BYTES:
            if bucket:
                yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    if parameter.grad.layout is not torch.strided:
        raise UsageError("compress: a sparse gradient", hint="it says little enough as it is")
    return parameter.grad


def _padded(gradient: torch.Tensor, block: int) -> torch.Tensor:
    flat = gradient.reshape(-1)
    lacking = -len(flat) % block
    return torch.nn.functional.pad(flat, (0, lacking)) if lacking else flat


def _pieces(flat: torch.Tensor, like: list[torch.Tensor], block: int) -> list[torch.Tensor]:
    parts = flat.split([-(-tensor.numel() // block) * block for tensor in like])
    pairs = zip(parts, like, strict=True)
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in pairs]


def keep_residuals(
    residuals: list[torch.Tensor],
    unsaid: Sequence[torch.Tensor],
    finite: torch.Tensor,
    skipped: torch.Tensor | None = None,
) -> None:
    """What was not said now is said later; but where a gradient overflowed, or the step does not count,
    nothing was said."""
    said = finite if skipped is None else finite & (skipped.to(finite.device).view(()) == 0)
    for residual, rest in zip(residuals, unsaid, strict=True):
        residual.copy_(torch.where(said, rest, residual))


def residuals_of(parameters: Iterable[torch.Tensor]) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The residuals of these parameters: what compression has not said of their gradients yet. A parameter
    that an optimizer was given later, and has not stepped yet, has one too."""
    wanted = {id(parameter) for parameter in parameters}
    for target, compressor in _known.items():
        for group in getattr(target, "param_groups", ()):
            for parameter in group["params"]:
                compressor.residual(parameter)
    pairs = (pair for c in _known.values() for pair in c.residuals.items())
    return {parameter: residual for parameter, residual in pairs if id(parameter) in wanted}


def forget_residual(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> None:
    """The optimizer does not have the parameter any more: its residual belongs to steps that were rewound."""
    if compressor := _known.get(optimizer):
        compressor.residuals.pop(parameter, None)


def described(parameters: Iterable[torch.Tensor]) -> list[str]:
    """How the gradients of these parameters are compressed, and what the log lacks of it, in words."""
    wanted = {id(parameter) for parameter in parameters}
    names = [c.name for c in _known.values() if wanted.intersection(map(id, c.parameters))]
    return [f"{name}; {_UNLOGGED}" if "feedback" in name else name for name in names]


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


def _parameters(target: Any) -> list[torch.nn.Parameter]:
    """Those whose gradients it is about, if they can be compressed."""
    if isinstance(target, torch.optim.Optimizer):
        found = [p for group in target.param_groups for p in group["params"]]
    elif isinstance(target, DistributedDataParallel):
        found = [p for p in target.parameters() if p.requires_grad]
    else:
        raise UsageError(
            f"compress: a {type(target).__name__}",
            hint="give an optimizer, or a DistributedDataParallel whose communication is compressed",
        )
    if any(p.is_complex() for p in found):
        raise UsageError("compress: complex parameters", hint="leave their optimizer as it is")
    taken = {id(p) for c in _known.values() for p in c.parameters}
    if any(id(p) in taken for p in found):
        raise UsageError(
            f"compress: parameters of this {type(target).__name__} are compressed already",
            hint="compress either the optimizer or DDP's communication, once",
        )
    return found
