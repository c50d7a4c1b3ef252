"""Compressed gradients between the ranks of DistributedDataParallel, bucket by bucket.

Every rank says its bucket with few bits, all ranks hear all of them, and each adds them up in the order of
the ranks: all get the same bits, run after run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everystep.compression.compressor import Compressor, keep_residuals
from everystep.errors import UsageError

# renamed in torch 2.13
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def communicate(compressor: Compressor, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook."""
    method = compressor.method
    assert method is not None
    flat = bucket.buffer()
    residuals = [r for p in bucket.parameters() if (r := compressor.residual(p)) is not None]
    gradients = _gradients(bucket) if residuals else []
    if residuals:
        torch._foreach_add_(gradients, residuals)
    wire = method.encode(flat)
    if residuals:
        finite = flat.isfinite().all()
        flat -= method.decode(
            wire, len(flat), flat.dtype
        )  # the gradients, views of it, are what is left
        keep_residuals(residuals, gradients, finite)
    *others, last = [_gather(part) for part in wire]

    def add_up(_: Any) -> torch.Tensor:
        """Runs behind the last part, on a stream of its own where there are streams."""
        for gathering in others:
            gathering.work.wait()
        ranks, total = dist.get_world_size(), torch.zeros_like(flat)
        for gathering in (*others, last):
            if gathering.everyone.is_cuda:
                gathering.everyone.record_stream(torch.cuda.current_stream())
        for rank in range(ranks):
            own = tuple(gathering.of(rank) for gathering in (*others, last))
            total += method.decode(own, len(flat), flat.dtype)
        return total.div_(ranks)

    future: torch.futures.Future[torch.Tensor] = last.work.get_future().then(add_up)
    return future


def _gradients(bucket: Any) -> list[torch.Tensor]:
    """Views of the bucket. DDP's own have the shapes of the parameters but not their layout, which the bucket
    follows where it leaves no gaps."""
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    return [g.as_strided(p.shape, p.stride()) if _is_dense(p) else g for p, g in pairs]


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class _Gathering(NamedTuple):
    """One part of what every rank says."""

    work: Any
    everyone: torch.Tensor
    part: torch.Tensor

    def of(self, rank: int) -> torch.Tensor:
        return self.everyone.view(-1, *self.part.shape)[rank]


def _gather(part: torch.Tensor) -> _Gathering:
    data = part.contiguous().view(torch.uint8)  # not every backend knows every type
    everyone = data.new_empty(dist.get_world_size() * data.numel())
    work = _all_gather(everyone, data.view(-1), async_op=True)
    return _Gathering(work, everyone.view(part.dtype), part)


def use_powersgd(target: Any, rank: int) -> None:
    """torch's own hook. What it makes of gradients is logged as it is. Its memory is empty after a resume."""
    if not isinstance(target, DistributedDataParallel):
        raise UsageError(
            f"compress: powersgd of a {type(target).__name__}",
            hint="it needs DistributedDataParallel",
        )
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    target.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
