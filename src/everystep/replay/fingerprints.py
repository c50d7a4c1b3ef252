"""Digests of live tensors, on the device where they lie and without waiting for it; a shadow computes the
same over its replica (`lane.memory.digests`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORD_BYTES = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_digest_order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Places of the tensors, those that are smaller than a word last, by their width."""
    small = {i for i, t in enumerate(tensors) if _is_small(t)}
    large = [i for i in range(len(tensors)) if i not in small]
    return large + sorted(small, key=lambda i: tensors[i].element_size())


def digest_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number for each of a device's tensors, given in digest order."""
    found = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    with torch.no_grad():
        large = sum(not _is_small(t) for t in tensors)
        for tensor, sum_of_words in zip(tensors[:large], found[:large].unbind(), strict=True):
            _add_digest(tensor, sum_of_words)
        for width, integer in _INTEGERS.items():  # step counters: hundreds of single numbers
            own = [i for i in range(large, len(tensors)) if tensors[i].element_size() == width]
            if own:
                # as integers: stacked as they are, types of one width would become one type
                single = [tensors[i].detach().view(integer).reshape(()) for i in own]
                found[own[0] : own[-1] + 1] = torch.stack(single)
    return found


def load_kernels(device: torch.device) -> None:
    """Digest a few numbers, so that what CUDA loads for it, half a second, is not loaded during a step."""
    samples = [
        torch.zeros(n, dtype=t, device=device) for t in _INTEGERS.values() for n in (1, 1023)
    ]
    digest_tensors([samples[i] for i in in_digest_order(samples)])


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.nbytes < _WORD_BYTES


def _add_digest(tensor: torch.Tensor, target: torch.Tensor) -> None:
    width = tensor.element_size()
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * width % _WORD_BYTES:
        flat = flat.clone()  # a view into a larger tensor: torch reads words only where words begin
    whole = flat.numel() * width // _WORD_BYTES * _WORD_BYTES // width
    if whole:
        torch.sum(flat[:whole].view(torch.int64), 0, out=target)
    if whole < flat.numel():
        target.add_(flat[whole:].view(_INTEGERS[width]).sum(dtype=torch.int64))
