"""Random states of every kind come back; a kind that cannot is told once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from everystep.capture import rng

KINDS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]
SOURCE: Any = np.random


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = SOURCE.get_bit_generator()
    yield
    SOURCE.set_bit_generator(before)


def numbers() -> list[float]:
    return [*np.random.randn(3).tolist(), *np.random.randint(0, 99, 3).tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["MT19937", "PCG64"])
def test_numpys_generators(kind: str, other: str) -> None:
    SOURCE.set_bit_generator(getattr(np.random, kind)(3))
    np.random.randn()  # the second of two normal numbers is kept aside
    state = rng.capture_rng()
    expected = numbers()
    SOURCE.set_bit_generator(getattr(np.random, other)(4))
    rng.restore_rng(state)
    assert type(SOURCE.get_bit_generator()).__name__ == kind and numbers() == expected


class Own(np.random.PCG64):
    """A user's generator, which no other process could build by its name."""


def test_a_generator_that_is_not_numpys_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_numpy_state", rng._NumpyState())
    SOURCE.set_bit_generator(Own(3))
    with pytest.warns(UserWarning, match=r"Own.*not recorded"):
        rng.capture_rng()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rng.restore_rng(rng.capture_rng())
