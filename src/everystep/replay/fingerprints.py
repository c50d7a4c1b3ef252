"""Digests of live tensors, on the device where they lie and without waiting for it; a shadow computes the
same over its replica (`lane.memory.digests`)."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from everystep.native.digests import KERNEL, KERNEL_RUNS, LANES, Run, add_digests, table, weights
from everystep.replay.nvrtc import Kernel

log = logging.getLogger("everystep")

_COPY_BYTES = 8 << 20  # of what is not contiguous, at a time
_CHUNK = 1 << 19  # words that plain torch takes at a time: three temporaries of 8 bytes each
_THREADS = 256
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
Launch = Callable[[np.ndarray, int, torch.Tensor], None]  # of a table and its pieces, into sums


def digest_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number for each of a device's tensors. It is that of the logical tensor: strides do not matter."""
    device = tensors[0].device
    with torch.no_grad():
        if device.type == "cpu":
            return _on_the_processor(tensors)
        launch = _kernel(device) if device.type == "cuda" else None
        return in_plain_torch(tensors) if launch is None else by_kernel(tensors, launch)


def load_kernels(device: torch.device) -> None:
    """Compile what CUDA needs for digests now: during a step it would cost half a second."""
    types = _INTEGERS.values() if device.type == "cuda" else ()
    for integer in types:  # where plain torch computes them, it loads code for each
        digest_tensors([torch.zeros(n, dtype=integer, device=device) for n in (1, 1023)])


def _on_the_processor(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    sums = np.zeros(len(tensors), np.int64)
    for runs in _batches(tensors, len(tensors)):
        add_digests(runs, sums, torch.get_num_threads())
    return torch.from_numpy(sums)


# ------------------------------------------------------------------ by a kernel of our own


def by_kernel(tensors: Sequence[torch.Tensor], launch: Launch) -> torch.Tensor:
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for runs in _batches(tensors, KERNEL_RUNS):
        rows, pieces = table(runs)
        if pieces:
            launch(rows, pieces, sums)
    return sums


@functools.cache
def _kernel(device: torch.device) -> Launch | None:
    """None where it cannot be compiled, or gives other numbers than the processor."""
    try:
        launch = functools.partial(_launch, Kernel(KERNEL, "digest_runs", device))
        problem = _difference(launch, device)
    except (OSError, AttributeError, RuntimeError) as error:
        problem = str(error)
    if problem:
        told = (
            "digest_kernel_missing device=%s: plain torch computes fingerprints, slower; reason: %s"
        )
        log.warning(told, device, problem)
        return None
    return launch


def _launch(kernel: Kernel, rows: np.ndarray, pieces: int, sums: torch.Tensor) -> None:
    by_value = (ctypes.c_uint64 * (KERNEL_RUNS * rows.shape[1]))(*rows.ravel().tolist())
    arguments = [by_value, ctypes.c_int(len(rows)), ctypes.c_void_p(sums.data_ptr())]
    kernel.launch(pieces, _THREADS, arguments)


def _difference(launch: Launch, device: torch.device) -> str:
    """Of a few numbers of every width, aligned and not, more than a piece of them and less."""
    noise = torch.arange(200_003, dtype=torch.int64).mul_(0x5DEECE66D).view(torch.uint8)
    samples = [
        noise[start * integer.itemsize :][: count * integer.itemsize].clone().view(integer)
        for integer in (torch.uint8, torch.int16, torch.int32, torch.int64)
        for start, count in ((0, 1), (5, 40), (7, 150_001))
    ]
    there = [sample.to(device)[skipped:] for sample in samples for skipped in (0, 3)]
    here = [sample[skipped:] for sample in samples for skipped in (0, 3)]
    found, expected = by_kernel(there, launch).tolist(), digest_tensors(here).tolist()
    wrong = [i for i, number in enumerate(expected) if found[i] != number]
    return f"{len(wrong)} of {len(found)} samples differ, first {wrong[0]}" if wrong else ""


# ------------------------------------------------------------------ in plain torch


def in_plain_torch(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same numbers on any device, with several passes over small temporaries."""
    found = {i: _in_chunks(tensor) for i, tensor in enumerate(tensors) if tensor.numel() != 1}
    for width in _INTEGERS:  # step counters: hundreds of single numbers
        own = [i for i, t in enumerate(tensors) if t.numel() == 1 and t.element_size() == width]
        if own:
            words = torch.stack([_words(tensors[i]) for i in own])
            sums = _numbers(words).mul_(_weights(0, words.shape[1], words.device)).sum(1)
            found |= dict(zip(own, sums.unbind(), strict=True))
    return torch.stack([found[i] for i in range(len(tensors))])


def _in_chunks(tensor: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for before, part in _contiguous_parts(tensor, 0):
        words = _words(part)
        start = before * max(tensor.element_size() // 4, 1)
        for at in range(0, len(words), _CHUNK):
            some = _numbers(words[at : at + _CHUNK])
            total += some.mul_(_weights(start + at, len(some), tensor.device)).sum()
    return total


def _weights(start: int, count: int, device: torch.device) -> torch.Tensor:
    first, skipped = divmod(start, LANES)
    groups = torch.arange(first, -(-(start + count) // LANES), device=device)
    found: torch.Tensor = weights(groups, torch.arange(LANES, device=device))
    return found[skipped : skipped + count]


def _words(part: torch.Tensor) -> torch.Tensor:
    """Of a contiguous tensor; where there is at most one element, torch calls any stride contiguous."""
    flat = part.as_strided((part.numel(),), (1,))
    return flat.view(_INTEGERS[part.element_size()])


def _numbers(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int64).bitwise_and_((1 << 8 * words.element_size()) - 1)


# ------------------------------------------------------------------ what lies where


def _batches(tensors: Sequence[torch.Tensor], runs_max: int) -> Iterator[list[Run]]:
    """Runs of all tensors, some at a time. Copies of what is not contiguous live until the next are made."""
    runs: list[Run] = []
    copies: list[torch.Tensor] = []
    for number, tensor in enumerate(tensors):
        for start, part in _contiguous_parts(tensor, 0):
            runs.append(Run(part.data_ptr(), part.numel(), part.element_size(), start, number))
            if part is not tensor:
                copies.append(part)
            if len(runs) == runs_max or sum(copy.nbytes for copy in copies) >= _COPY_BYTES:
                yield runs
                runs, copies = [], []
    if runs:
        yield runs


def _contiguous_parts(tensor: torch.Tensor, start: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensor in row-major order, from its element `start` on: as it is, or copied part by part."""
    if tensor.is_contiguous() or tensor.nbytes <= _COPY_BYTES:
        yield start, tensor.contiguous()
        return
    row = tensor[0].numel()
    rows = _COPY_BYTES // (row * tensor.element_size())
    for at in range(0, len(tensor), max(rows, 1)):
        part = tensor[at : at + rows] if rows else tensor[at]
        yield from _contiguous_parts(part, start + at * row)
