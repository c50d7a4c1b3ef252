"""Random states of every kind come back; a kind that cannot is told once, and what is none is refused."""

from __future__ import annotations

import math
import random
import struct
import warnings
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from everystep.capture import rng
from everystep.errors import CorruptData, UnsupportedState
from everystep.format import values
from everystep.format.random_states import RandomStates, unpack_random_states

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


# ---------------------------------------------------------------------- states that somebody else wrote

U32, U64 = 2**32, 2**64
HUGE = (-1, 1000, 10**6, 10**7, U32, 2**40, 2**63, U64 - 1)


def changed(**fields: Any) -> bytes:
    states = msgspec.msgpack.decode(rng.capture_rng(), type=RandomStates)
    return msgspec.msgpack.encode(msgspec.structs.replace(states, **fields))


def of_python(words: list[int], gauss: Any = None, version: int = 3) -> bytes:
    return changed(python=(version, array("Q", words).tobytes(), gauss))


def of_numpy(*state: Any) -> bytes:
    return changed(numpy=state)


def of_torch(code: str, at: int, *numbers: float) -> bytes:
    state = bytearray(torch.get_rng_state().numpy().tobytes())
    struct.pack_into(code, state, at, *numbers)
    return changed(torch_cpu=bytes(state))


def document(kind: str, **fields: Any) -> bytes:
    """What numpy tells of one of its generators, changed in a few places, of its inner state too."""
    SOURCE.set_bit_generator(getattr(np.random, kind)(3))
    told = np.random.get_state(legacy=False)
    inner = {key: fields.pop(key) for key in told["state"].keys() & fields.keys()}
    told |= {"state": told["state"] | inner} | fields
    return of_numpy(kind, values.encode(told, ""), 0, 0, 0.0)


KEY, WORDS = bytes(2496), [0] * 624
HOSTILE: dict[str, Callable[[], bytes]] = {
    **{f"numpy at {n}": lambda n=n: of_numpy("MT19937", KEY, n, 0, 0.0) for n in (625, *HUGE)},
    **{f"python at {n}": lambda n=n: of_python([*WORDS, n]) for n in (625, *HUGE[1:])},
    **{
        f"torch's next {n}": lambda n=n: of_torch("<iiQ", 8, 2, 1, n) for n in (624, 625, *HUGE[1:])
    },
    **{f"torch's left {n}": lambda n=n: of_torch("<iiQ", 8, n, 1, 0) for n in (-5, 0, 625, 10**6)},
    **{f"Philox at {n}": lambda n=n: document("Philox", buffer_pos=n) for n in (5, *HUGE)},
    "numpy, too few words": lambda: of_numpy("MT19937", KEY[:-4], 0, 0, 0.0),
    "numpy, too many words": lambda: of_numpy("MT19937", KEY * 2, 0, 0, 0.0),
    "numpy, two normals": lambda: of_numpy("MT19937", KEY, 0, 2, 0.0),
    "numpy, no number": lambda: of_numpy("MT19937", KEY, 0, 1, math.nan),
    "numpy, text for a number": lambda: of_numpy("MT19937", KEY, 0, 1, "1.0"),
    "numpy, a generator of no kind": lambda: of_numpy("default_rng", KEY, 0, 0, 0.0),
    "numpy, another in its place": lambda: document("PCG64", bit_generator="Philox"),
    "PCG64, a long number": lambda: document("PCG64", inc=2**128),
    "PCG64, a negative one": lambda: document("PCG64", uinteger=-1),
    "PCG64, no float": lambda: document("PCG64", gauss="x"),
    "PCG64, an array": lambda: document("PCG64", state={"state": np.zeros(3), "inc": 1}),
    "Philox, a short buffer": lambda: document("Philox", buffer=np.zeros(3, np.uint64)),
    "Philox, a buffer of floats": lambda: document("Philox", buffer=np.zeros(4)),
    "Philox, a short key": lambda: document("Philox", key=np.zeros(1, np.uint64)),
    "SFC64, no words": lambda: document("SFC64", state={"state": [1, 2, 3, 4]}),
    "python, too few words": lambda: of_python(WORDS),
    "python, a long word": lambda: of_python([U32, *WORDS[1:], 0]),
    "python, another version": lambda: of_python([*WORDS, 0], version=2),
    "python, no number": lambda: of_python([*WORDS, 0], math.inf),
    "python, text for a number": lambda: of_python([*WORDS, 0], "1.0"),
    "torch, words behind its own": lambda: of_torch("<iiQ", 8, 624, 1, 600),
    "torch, never seeded": lambda: of_torch("<iiQ", 8, 1, 0, 0),
    "torch, no number": lambda: of_torch("<3di", 5016, 0.0, math.nan, 0.0, 1),
    "torch, a flag of 2": lambda: of_torch("<B", 5052, 2),
    "torch, one byte less": lambda: changed(torch_cpu=bytes(5055)),
    "torch, random bytes": lambda: changed(torch_cpu=random.Random(3).randbytes(5056)),
    "a CUDA device, short": lambda: changed(torch_cuda=(bytes(15),)),
    "a CUDA device between numbers": lambda: changed(torch_cuda=(struct.pack("<QQ", 1, 2),)),
    "more than all devices have": lambda: changed(torch_cuda=(bytes(16),) * 50_000),
    "nothing": lambda: b"",
    "another document": lambda: msgspec.msgpack.encode([1, 2, 3]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_states_that_no_generator_has_are_refused(name: str) -> None:
    """One of numpy's behind its words ended the process at the next draw."""
    data = HOSTILE[name]()
    before = rng.capture_rng()
    for work in (unpack_random_states, rng.check_rng, rng.restore_rng):
        with pytest.raises(CorruptData):
            work(data)
    assert rng.capture_rng() == before, "nothing was changed"


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_every_moment_are_taken(kind: str) -> None:
    """However many numbers were drawn, and whatever is kept aside."""
    SOURCE.set_bit_generator(getattr(np.random, kind)(3))
    draws: list[Callable[[], object]] = [
        np.random.rand,
        np.random.randn,
        lambda: np.random.randint(0, 99, dtype=np.uint32),
        random.random,
        lambda: random.gauss(0, 1),
        lambda: torch.rand(1),
        lambda: torch.randn(1, dtype=torch.float64),
        lambda: torch.normal(0.0, 1.0, (1,)),
    ]
    chance = random.Random(5)
    for _ in range(1500):
        chance.choice(draws)()
        rng.check_rng(rng.capture_rng())


def test_generators_of_a_newer_torch_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when training is to go on."""
    rng.check_recordable()
    monkeypatch.setattr(torch, "get_rng_state", lambda: torch.zeros(6000, dtype=torch.uint8))
    with pytest.raises(UnsupportedState, match="torch"):
        rng.check_recordable()
