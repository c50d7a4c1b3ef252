"""Gradients that are lazy conjugates or negatives: a device's copies move memory, not meaning."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from exact.lagging import LaggingSide

from everystep.capture.copying.gradient_copies import GradientCopies
from everystep.capture.copying.in_flight import InFlightBuffers
from everystep.core.census import Atom, Census, Mode, OptimizerSpec, gradient_layout


class RawSide(LaggingSide):
    """Copies bytes as the CUDA runtime does."""

    def offload(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def test_what_a_step_would_see_is_copied() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
    (parameter.conj() * torch.randn(3, dtype=torch.complex64)).sum().abs().backward()
    conjugate = parameter.grad
    assert conjugate is not None and conjugate.is_conj(), "torch makes no lazy gradients any more"
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    gradients = [conjugate, negative, None]
    atoms = (Atom("c", "complex64", (3,)), Atom("n", "float32", (3,)), Atom("x", "float32", (3,)))
    spec = OptimizerSpec("", "torch.optim:SGD", Mode.REPLAY, ((0, 1, 2),))
    layout = gradient_layout(Census(atoms, (spec,), "exact"), 0)
    for early in (False, True):
        memory = torch.zeros(4096, dtype=torch.uint8)
        copies = GradientCopies(memory, {torch.device("cpu"): RawSide(1, 1.0)}, InFlightBuffers())
        if early:
            copies.send_some(0, 0, layout, {0: conjugate})
        else:
            copies.send(0, 0, layout, gradients)
        found = memory[layout.offsets[0] :][:24].view(torch.complex64)
        assert torch.equal(found, conjugate)
        if not early:
            assert torch.equal(memory[layout.offsets[1] :][:12].view(torch.float32), negative)
