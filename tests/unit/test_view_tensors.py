"""Many tensors out of one payload are what each would be alone."""

from __future__ import annotations

import random

import pytest
import torch

from everystep.replay.tensors import view_tensor, view_tensors

PLACES = [
    (64, "float32", (3, 5)),
    (0, "bfloat16", (7,)),
    (128, "float32", ()),
    (192, "int64", (2, 2, 2)),
    (256, "float32", (0, 4)),
    (260, "bfloat16", (1, 9)),
    (300, "uint8", (13,)),
]


@pytest.mark.parametrize("shift", [0, 1])
def test_views_of_host_memory(shift: int) -> None:
    data = memoryview(bytearray(random.Random(1).randbytes(400)))[shift:]
    check(data, [bytes(data[at:]) for at, *_ in PLACES])


def test_views_of_a_tensor_that_does_not_begin_its_memory() -> None:
    data = torch.frombuffer(bytearray(random.Random(2).randbytes(500)), dtype=torch.uint8)[64:]
    check(data, [bytes(data[at:].tolist()) for at, *_ in PLACES])


def check(data: memoryview | torch.Tensor, behind: list[bytes]) -> None:
    views = list(view_tensors(data, PLACES))
    for view, rest, (_, dtype, shape) in zip(views, behind, PLACES, strict=True):
        own = memoryview(bytearray(rest[: view.nbytes]))
        expected = view_tensor(own, dtype, shape)
        assert (view.dtype, view.shape) == (expected.dtype, expected.shape)
        if view.numel():
            assert view.is_contiguous() and view.stride() == expected.stride()
            assert bytes(view.contiguous().view(-1).view(torch.uint8).tolist()) == bytes(own)


def test_what_ends_behind_the_payload_is_refused() -> None:
    with pytest.raises(RuntimeError):
        list(view_tensors(memoryview(bytearray(64)), [(60, "float32", (2,))]))
