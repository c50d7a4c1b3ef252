"""Compressed gradients between the ranks of DistributedDataParallel, bucket by bucket.

Every rank says its bucket with few bits, all ranks hear all of them, and each adds them up in the order of
the ranks: all get the same bits, run after run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everystep.compression.compressor import Compressor
from everystep.errors import UsageError

# renamed in torch 2.13
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def communicate(compressor: Compressor, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook."""
    method = compressor.method
    assert method is not None
    flat = bucket.buffer()
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if parameter in compressor.residuals:
            gradient += compressor.residuals[parameter]
    wire = method.encode(flat)
    if compressor.residuals:
        flat -= method.decode(wire, len(flat), flat.dtype)  # what is left unsaid
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            compressor.residuals[parameter].copy_(gradient)
    gathered = [_gather(part) for part in wire]

    def add_up(_: Any) -> torch.Tensor:
        ranks = dist.get_world_size()
        total = torch.zeros_like(flat)
        for rank in range(ranks):
            own = tuple(
                parts.view(ranks, *part.shape)[rank]
                for (parts, _), part in zip(gathered, wire, strict=True)
            )
            total += method.decode(own, len(flat), flat.dtype)
        return total.div_(ranks)

    futures = torch.futures.collect_all([future for _, future in gathered])
    return futures.then(add_up)


def _gather(part: torch.Tensor) -> tuple[torch.Tensor, torch.futures.Future[Any]]:
    data = part.contiguous().view(torch.uint8)  # not every backend knows every type
    everyone = data.new_empty(dist.get_world_size() * data.numel())
    work = _all_gather(everyone, data.view(-1), async_op=True)
    return everyone.view(part.dtype), work.get_future()


def use_powersgd(target: Any, rank: int) -> None:
    """torch's own hook. What it makes of gradients is logged as it is; its memory begins anew at a resume."""
    if not isinstance(target, DistributedDataParallel):
        raise UsageError(
            f"compress: powersgd of a {type(target).__name__}",
            hint="it needs DistributedDataParallel",
        )
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    target.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
