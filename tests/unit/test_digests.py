"""Digests of tensors: what the trainer computes is what the shadow computes."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep import native
from everystep.core.pace import fingerprint_every
from everystep.lane import memory
from everystep.replay.fingerprints import digest_tensors, in_digest_order

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.float16]
DTYPES += [torch.int32, torch.bool, torch.float8_e5m2]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 70), st.sampled_from(DTYPES)), min_size=1), st.randoms())
def test_three_ways_to_the_same_digest(shapes: list[Any], chance: random.Random) -> None:
    """torch, C and numpy; and one flipped bit changes it."""
    tensors = []
    for size, dtype in shapes:
        data = bytearray(chance.randbytes(size * dtype.itemsize))
        tensors.append(torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype))
    order = in_digest_order(tensors)
    tensors = [tensors[i] for i in order]
    live = digest_tensors(tensors).tolist()
    views = [memoryview(t.view(torch.uint8).numpy()).cast("B") for t in tensors]
    widths = [t.element_size() for t in tensors]
    plain = [memory._digest(v, w) for v, w in zip(views, widths, strict=True)]
    assert live == plain
    if native.library() is not None:
        assert live == memory.digests(views, widths)
    for number, view in enumerate(views):
        if len(view):
            place = chance.randrange(8 * len(view))
            view[place // 8] ^= 1 << place % 8
            assert memory._digest(view, widths[number]) != plain[number]


def test_layout_does_not_matter() -> None:
    image = torch.randn(2, 3, 5, 7)
    other = image.to(memory_format=torch.channels_last)
    assert other.stride() != image.stride()
    assert digest_tensors([image]).tolist() == digest_tensors([other]).tolist()


def test_a_view_that_begins_within_a_word() -> None:
    flat = torch.randn(64)
    for start in range(4):
        view = flat[start : start + 9]
        assert digest_tensors([view]).tolist() == digest_tensors([view.clone()]).tolist()


def test_single_numbers_of_several_types() -> None:
    pairs = [
        (torch.float32, torch.int32),
        (torch.float16, torch.bfloat16),
        (torch.bool, torch.int8),
    ]
    for types in pairs:
        tensors = [torch.tensor(1, dtype=dtype) for dtype in types]
        alone = [digest_tensors([tensor]).item() for tensor in tensors]
        assert digest_tensors(tensors).tolist() == alone


def test_how_often() -> None:
    assert fingerprint_every(0.0, 0.1) == 16
    assert fingerprint_every(0.006, 0.1) == 60, "a thousandth of the time"
    assert fingerprint_every(5.0, 0.001) == 1024, "now and then it must be"
    assert fingerprint_every(0.1, 0.0) == 16, "nothing measured yet"
