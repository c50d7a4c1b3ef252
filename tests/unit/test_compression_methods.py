"""What each method keeps of a gradient, on any values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import everystep
from everystep.compression.methods import FP8, INT8, Bfloat16, Method, RandomK, TopK
from everystep.errors import UsageError

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
values = st.lists(
    st.floats(-4, 4, width=16) | st.sampled_from([0.0, -0.0, 1.0, -1.0]), min_size=1, max_size=300
)


def through(method: Method, flat: torch.Tensor) -> torch.Tensor:
    return method.decode(method.encode(flat), len(flat), flat.dtype)


@settings(max_examples=150)
@given(values, st.floats(0.001, 1), st.sampled_from(DTYPES))
def test_top_k_keeps_exactly_the_largest(
    numbers: list[float], ratio: float, dtype: torch.dtype
) -> None:
    flat = torch.tensor(numbers, dtype=dtype)
    count = math.ceil(ratio * len(flat))
    order = sorted(range(len(flat)), key=lambda i: (-abs(flat[i].item()), i))
    expected = torch.zeros_like(flat)
    expected[order[:count]] = flat[order[:count]]
    places, _ = TopK(ratio).encode(flat)
    assert sorted(places.tolist()) == sorted(order[:count])
    assert torch.equal(through(TopK(ratio), flat), expected)


def test_top_k_does_not_hide_what_is_not_finite() -> None:
    flat = torch.tensor([1.0, math.nan, 3.0, math.inf, *[2.0] * 16])
    kept = through(TopK(0.1), flat)
    assert kept[1].isnan() and kept[3].isinf() and kept.count_nonzero() == 2


@given(st.integers(1, 500), st.floats(0.01, 1))
def test_random_k_depends_on_the_generator_alone(size: int, ratio: float) -> None:
    flat = torch.randn(size)
    torch.manual_seed(3)
    kept = through(RandomK(ratio), flat)
    torch.manual_seed(3)
    assert torch.equal(kept, through(RandomK(ratio), flat))
    assert 0 < kept.count_nonzero() <= math.ceil(ratio * size)
    assert ((kept == flat) | (kept == 0)).all()


@settings(max_examples=150)
@given(values, st.sampled_from([(INT8, 2**-6), (FP8, 2**-3)]), st.integers(-100, 100))
def test_blocks_err_by_a_share_of_their_largest(
    numbers: list[float], method: tuple[Method, float], exponent: int
) -> None:
    flat = torch.ldexp(torch.tensor(numbers), torch.tensor(exponent))
    kept = through(method[0], flat)
    for start in range(0, len(flat), 32):
        block = flat[start : start + 32]
        bound = block.abs().max() * method[1]
        assert ((kept[start : start + 32] - block).abs() <= bound).all()
    if method[0] is INT8:  # fp8 may round a block's largest up to the next power of two
        assert torch.equal(through(INT8, kept), kept), "compressing again changes nothing"


@pytest.mark.parametrize("method", [INT8, FP8])
def test_blocks_say_that_something_is_not_finite(method: Method) -> None:
    flat = torch.ones(70)
    flat[40] = math.inf
    kept = through(method, flat)
    assert kept[32:64].isnan().all() and kept[:32].eq(1).all() and kept[64:].eq(1).all()


def test_bfloat16_rounds() -> None:
    flat = torch.randn(100)
    assert torch.equal(through(Bfloat16(), flat), flat.bfloat16().float())


def test_what_cannot_be_meant_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(UsageError, match="no method 'top'"):
        everystep.compress(optimizer, "top")
    with pytest.raises(UsageError, match="ratio 0"):
        everystep.compress(optimizer, "topk", ratio=0)
    with pytest.raises(UsageError, match="powersgd"):
        everystep.compress(optimizer, "powersgd")
    with pytest.raises(UsageError, match="a Linear"):
        everystep.compress(torch.nn.Linear(2, 2), "topk")  # type: ignore[arg-type]
    everystep.compress(optimizer, "topk")
    with pytest.raises(UsageError, match="already"):
        everystep.compress(optimizer, "bf16")
    with pytest.raises(UsageError, match="already"):
        everystep.compress(torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1), "bf16")
    numbers = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match="complex"):
        everystep.compress(torch.optim.SGD([numbers], lr=0.1), "int8")


@pytest.mark.parametrize("method", [TopK(0.1), RandomK(0.1), INT8, FP8, Bfloat16()])
def test_nothing_stays_nothing(method: Method) -> None:
    assert through(method, torch.zeros(0)).shape == (0,)
