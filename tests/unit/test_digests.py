"""Digests of tensors: whoever computes one finds the same number, it adds up over regions, and content that
changes or moves changes it."""

from __future__ import annotations

import ctypes
import itertools
import operator
import random
from collections.abc import Callable
from typing import Any

import emulated_gpu
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everystep import native
from everystep.core.pace import fingerprint_every
from everystep.lane import memory
from everystep.native.digests import Run, add_digests, table
from everystep.native.digests import weights as weights_of
from everystep.replay import fingerprints
from everystep.replay.fingerprints import by_kernel, digest_tensors, in_plain_torch

SEEDS = st.integers(0, 1 << 32)
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.float16]
DTYPES += [torch.int32, torch.bool, torch.float8_e5m2, torch.complex64, torch.uint16]
HIGH = (1 << 32) - 64
MODULUS = 1 << 64


def factor(group: int) -> int:
    """As docs/FORMAT.md has it."""
    x = ((group << 6) + 0x6A09E640) % (1 << 32)
    x ^= (x >> 13) & HIGH
    x = (x * 0xAE2EB155 + (group >> 26) * 0x9E3779C0 + 0xBB67AE80) % (1 << 32)
    x ^= (x >> 11) & HIGH
    x = (x * 0x881ED163 + 0x3C6EF340) % (1 << 32)
    x ^= (x >> 12) & HIGH
    x = (x * 0xFAECBD39 + 0xA54FF500) % (1 << 32)
    x ^= (x >> 13) & HIGH
    return x | 1


def weight(place: int) -> int:
    group, lane = divmod(place, 32)
    return factor(group) * (factor(MODULUS - 1 - lane) + 2 * lane)


def oracle(data: memoryview | bytes, width: int, start: int = 0) -> int:
    size = min(width, 4)
    words = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    first = start * (width // size)
    found = sum(word * weight(first + i) for i, word in enumerate(words)) % MODULUS
    return found - MODULUS if found >> 63 else found


def noise(chance: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    raw = bytearray(chance.randbytes(count * dtype.itemsize))
    if dtype is torch.bool:  # torch makes other bytes one of the two when it copies them
        raw = bytearray(byte & 1 for byte in raw)
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def flattened(tensor: torch.Tensor) -> memoryview:
    """A copy of its bytes in row-major order."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return memoryview(bytearray(flat.view(torch.uint8).numpy().tobytes()))


def in_shadow(tensors: list[torch.Tensor]) -> list[int]:
    return memory.digests([flattened(t) for t in tensors], [t.element_size() for t in tensors])


def without_compiler(tensors: list[torch.Tensor]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        return in_shadow(tensors)


def on_a_gpu(tensors: list[torch.Tensor]) -> list[int]:
    return by_kernel(tensors, emulated_gpu.launch).tolist()


WAYS: dict[str, Callable[[list[torch.Tensor]], list[int]]] = {
    "trainer": lambda tensors: digest_tensors(tensors).tolist(),
    "shadow": in_shadow,
    "numpy": without_compiler,
    "plain torch": lambda tensors: in_plain_torch(tensors).tolist(),
}
if emulated_gpu.COMPILER:
    WAYS["kernel"] = on_a_gpu


@st.composite
def tensors_of_all_kinds(draw: st.DrawFn) -> list[torch.Tensor]:
    """Contiguous or not, beginning anywhere in their memory."""
    chance = random.Random(draw(SEEDS))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        rows, columns = draw(st.sampled_from([(1, 1), (1, 2), (0, 3), (1, 31), (5, 13), (3, 300)]))
        skipped = draw(st.integers(0, 5))
        flat = noise(chance, rows * columns + skipped, dtype)
        tensor = flat[skipped:].view(rows, columns)
        found.append(draw(st.sampled_from([tensor, tensor.t(), tensor[:, ::2], tensor[::2, :1]])))
    return found


@settings(max_examples=60)
@given(tensors_of_all_kinds())
def test_every_way_leads_to_the_same_digest(tensors: list[torch.Tensor]) -> None:
    expected = [oracle(flattened(t), t.element_size()) for t in tensors]
    assert {name: way(tensors) for name, way in WAYS.items()} == dict.fromkeys(WAYS, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64])
def test_more_than_a_piece(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough that several threads, launches, chunks and copies share the work."""
    monkeypatch.setattr(fingerprints, "_CHUNK", 1 << 14)
    monkeypatch.setattr(fingerprints, "_COPY_BYTES", 50_000)
    torch.manual_seed(1)
    large = torch.randint(0, 256, (8 * 7 * 20_011,), dtype=torch.uint8).view(dtype)[: 7 * 20_011]
    tensors = [large[3:], large.view(7, -1).t(), large.view(7, -1)[:, ::3], large[:0]]
    tensors += [large[i : i + 1] for i in range(100)]
    raw = np.frombuffer(flattened(tensors[0]), f"u{min(dtype.itemsize, 4)}").astype(object)
    weights = np.array([weight(place) for place in range(len(raw))], object)
    found = {name: way(tensors) for name, way in WAYS.items()}
    assert found == dict.fromkeys(WAYS, found["trainer"])
    assert found["trainer"][0] % MODULUS == (raw * weights).sum() % MODULUS


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 1 << 36) | st.integers((1 << 31) - 200, (1 << 31) + 200),
    st.integers(0, 200),
    SEEDS,
)
def test_a_run_in_the_middle_of_a_tensor(width: int, start: int, count: int, seed: int) -> None:
    """Places count in the whole tensor, however far away its beginning is."""
    data = bytearray(random.Random(seed).randbytes(count * width))
    address = memory.address_of(memoryview(data)) if data else 0
    run = Run(address, count, width, start)
    expected = oracle(bytes(data), width, start)
    for library in (native.library(), None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", lambda found=library: found)
            sums = np.zeros(1, np.int64)
            add_digests([run], sums, 2)
            assert sums.tolist() == [expected]
    if emulated_gpu.COMPILER and count:
        found = torch.zeros(1, dtype=torch.int64)
        emulated_gpu.launch(*table([run]), found)
        assert found.tolist() == [expected]


@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from(DTYPES), st.data())
def test_regions_add_up(rows: int, columns: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """A tensor cut into a grid: each region is a run for each of its rows."""
    chance = random.Random(data.draw(SEEDS))
    whole = noise(chance, rows * columns, dtype)
    cut = {
        size: sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=3))})
        for size in (rows, columns)
    }
    regions = [
        (top, bottom, left, right)
        for top, bottom in zip(cut[rows], cut[rows][1:], strict=False)
        for left, right in zip(cut[columns], cut[columns][1:], strict=False)
    ]
    sums = np.zeros(len(regions), np.int64)
    for number, (top, bottom, left, right) in enumerate(regions):
        pieces = [
            (whole[row * columns + left : row * columns + right].clone(), row * columns + left)
            for row in range(top, bottom)
        ]
        runs = [
            Run(part.data_ptr(), part.numel(), dtype.itemsize, start, number)
            for part, start in pieces
        ]
        add_digests(runs, sums, 1)
    assert int(sums.sum(dtype=np.int64)) == digest_tensors([whole]).item()


def rotated(flat: np.ndarray, chance: random.Random) -> np.ndarray:
    return np.roll(flat, chance.choice([1, -1, 2, 31, 32, 33, len(flat) // 2]))


def reversed_(flat: np.ndarray, chance: random.Random) -> np.ndarray:
    return flat[::-1].copy()


def halves_swapped(flat: np.ndarray, chance: random.Random) -> np.ndarray:
    half = len(flat) // 2
    return np.concatenate([flat[half:], flat[:half]])


def rows_swapped(flat: np.ndarray, chance: random.Random) -> np.ndarray:
    columns = chance.choice([2, 3, 8, 16, 32, 64])
    rows = flat[: len(flat) // columns * columns].reshape(-1, columns).copy()
    a, b = chance.randrange(len(rows)), chance.randrange(len(rows))
    rows[[a, b]] = rows[[b, a]]
    return np.concatenate([rows.ravel(), flat[rows.size :]])


def transposed(flat: np.ndarray, chance: random.Random) -> np.ndarray:
    columns = chance.choice([2, 8, 32])
    size = len(flat) // columns * columns
    return np.concatenate([flat[:size].reshape(-1, columns).T.ravel(), flat[size:]])


def two_exchanged(flat: np.ndarray, chance: random.Random) -> np.ndarray:
    found = flat.copy()
    a, b = chance.sample(range(len(flat)), 2)
    found[[a, b]] = found[[b, a]]
    return found


def same_sum(flat: np.ndarray, chance: random.Random) -> np.ndarray:
    """Neighbours change so that their sum does not, nor the one that counts places from 1 on."""
    found = flat.copy()
    at, by, apart = (
        chance.randrange(len(flat) - 64),
        chance.randrange(1, 100),
        chance.randint(1, 32),
    )
    for lane, times in enumerate((1, -2, 1)):
        found[at + lane * apart] += np.array(times * by).astype(flat.dtype)
    return found


def flipped(flat: np.ndarray, chance: random.Random) -> np.ndarray:
    raw = bytearray(flat.tobytes())
    bit = chance.randrange(8 * len(raw))
    raw[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(raw, flat.dtype)


CHANGES = [rotated, reversed_, halves_swapped, rows_swapped, transposed, two_exchanged, same_sum]
CHANGES.append(flipped)


@settings(max_examples=300)
@given(
    st.sampled_from(CHANGES),
    st.sampled_from(["u1", "u2", "u4", "u8"]),
    st.integers(70, 700),
    st.integers(1, 64),
    SEEDS,
)
def test_what_changes_or_moves_is_found(
    change: Any, kind: str, count: int, bits: int, seed: int
) -> None:
    """Also where elements have few bits that differ, the lowest or the highest, as in signs and counters."""
    chance = random.Random(seed)
    size = 8 * int(kind[1])
    some, shift = min(bits, size), chance.choice([0, size - min(bits, size)])
    before = np.array([chance.getrandbits(some) << shift for _ in range(count)], kind)
    after = change(before, chance)
    both = [memoryview(bytearray(a.tobytes())) for a in (before, after)]
    first, second = memory.digests(both, [before.itemsize] * 2)
    assert (first == second) == (before.tobytes() == after.tobytes())


def test_weights_are_odd_and_differ() -> None:
    """What `digest.h` proves detection with: within 2^31 places no two are equal modulo 2^32."""
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    chance = np.random.default_rng(seed)
    near, far = np.arange(1 << 12), chance.integers(0, 1 << 26, 1 << 12)
    groups = np.unique(np.concatenate([near, far, near + (1 << 26) - (1 << 12)]))
    found = weights_of(groups, np.arange(32)) & ((1 << 32) - 1)
    assert (found & 1).all()
    assert len(np.unique(found)) == 32 * len(groups)
    assert weights_of(np.arange(2), np.arange(32)).tolist() == [
        w - MODULUS if w >> 63 else w for w in map(weight, range(64))
    ]


def test_weights_have_no_simple_pattern() -> None:
    """Words that change by 1, -2 and 1, or by 1, -1, -1 and 1, at the same distance must not cancel out."""
    count = 2048
    near = weights_of(np.arange(count), np.arange(32))[::32]
    for apart in range(1, count // 2):
        steps = near[apart:] - near[:-apart]
        assert (steps[apart:] != steps[:-apart]).all()
        assert len(np.unique(steps)) >= len(steps) - 1, "as rare as by chance"
    lanes = weights_of(np.arange(1), np.arange(32)).tolist()
    for size, times in ((2, (1, 2, 3)), (3, (1, 2, 3)), (4, (1,))):
        for some in itertools.combinations(lanes, size):
            for signs in itertools.product([n for t in times for n in (t, -t)], repeat=size - 1):
                assert some[0] + sum(map(operator.mul, signs, some[1:])) != 0


class Compiled:
    """Stands for a kernel on a device; `off` makes its numbers wrong."""

    def __init__(self, off: int) -> None:
        self._off = off

    def launch(self, blocks: int, threads: int, arguments: list[Any]) -> None:
        rows = np.array(arguments[0], np.uint64).reshape(-1, 6)[: arguments[1].value]
        sums = (ctypes.c_int64 * (int(rows[:, 4].max()) + 1)).from_address(arguments[2].value)
        found = torch.frombuffer(sums, dtype=torch.int64)
        emulated_gpu.launch(rows, blocks, found)
        found[0] += self._off


@pytest.mark.skipif(emulated_gpu.COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("fault", ["none", "differs", "no library", "does not compile"])
def test_a_kernel_is_used_only_if_it_is_right(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(*_: object) -> Compiled:
        if fault == "no library":
            raise OSError("libcuda.so.1: cannot open shared object file")
        if fault == "does not compile":
            raise RuntimeError("compile digest.cu: error")
        return Compiled(off=int(fault == "differs"))

    monkeypatch.setattr(fingerprints, "Kernel", compiled)
    launch = fingerprints._kernel.__wrapped__(torch.device("cpu"))
    assert (launch is not None) == (fault == "none")
    assert ("digest_kernel_missing" in caplog.text) == (fault != "none")
    if launch is not None:
        tensors = [torch.arange(100_000), torch.ones(3)]
        assert by_kernel(tensors, launch).tolist() == digest_tensors(tensors).tolist()


def test_layout_does_not_matter() -> None:
    image = torch.randn(2, 3, 5, 7)
    other = image.to(memory_format=torch.channels_last)
    assert other.stride() != image.stride()
    assert digest_tensors([image]).tolist() == digest_tensors([other]).tolist()
    assert digest_tensors([image]).tolist() == digest_tensors([image.flatten()]).tolist()


def test_how_often() -> None:
    assert fingerprint_every(0.0, 0.1) == 16
    assert fingerprint_every(0.006, 0.1) == 60, "a thousandth of the time"
    assert fingerprint_every(5.0, 0.001) == 1024, "now and then it must be"
    assert fingerprint_every(0.1, 0.0) == 16, "nothing measured yet"
