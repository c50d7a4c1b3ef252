"""Digests on a GPU: the kernel and plain torch find the numbers of the processor, without waiting for the
device and in little memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep.native.digests import KERNEL, Run, add_digests, table
from everystep.replay import fingerprints
from everystep.replay.fingerprints import digest_tensors, in_plain_torch, load_kernels
from everystep.replay.nvrtc import Kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.uint16, torch.int16, torch.float16, torch.bfloat16]
DTYPES += [torch.uint32, torch.int32, torch.float32]
DTYPES += [torch.uint64, torch.int64, torch.float64, torch.complex64]
SIZES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 255, 1023, 4097, (1 << 15) - 1, 1 << 15, 100_003]
MEMORY_MAX = 32 << 20


@pytest.fixture(scope="module")
def device() -> torch.device:
    found = torch.device("cuda", torch.cuda.current_device())
    Kernel(KERNEL, "digest_runs", found)  # says what is wrong; the product would only log it
    load_kernels(found)
    assert fingerprints._kernel(found) is not None, "it compiles, but differs from the processor"
    return found


def noise(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def views(flat: torch.Tensor) -> list[torch.Tensor]:
    """The same elements in all kinds of views."""
    found = [flat, flat[1:], flat[3:-1], flat[:0], flat[::2]]
    if flat.numel() % 3 == 0:
        found += [flat.view(3, -1).t(), flat.view(3, -1)[:, 1:]]
    if flat.numel() % 12 == 0:
        image = flat.view(2, 3, 2, -1)
        found += [image.permute(3, 1, 0, 2), image.permute(0, 2, 3, 1)]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_ways_give_the_same(dtype: torch.dtype, device: torch.device) -> None:
    here = [v for i, n in enumerate([*SIZES, 12 * 341]) for v in views(noise(n, dtype, i))]
    there = [
        v for i, n in enumerate([*SIZES, 12 * 341]) for v in views(noise(n, dtype, i).to(device))
    ]
    expected = digest_tensors(here).tolist()
    by_kernel = digest_tensors(there).tolist()
    plain = in_plain_torch(there).tolist()
    wrong = [
        f"{dtype} {tuple(t.shape)} {t.stride()} offset {t.storage_offset()} at {t.data_ptr() % 64}: "
        f"processor {expected[i]:#x}, kernel {by_kernel[i]:#x}, plain torch {plain[i]:#x}"
        for i, t in enumerate(there)
        if not expected[i] == by_kernel[i] == plain[i]
    ]
    assert not wrong, f"{len(wrong)} of {len(there)}:\n" + "\n".join(wrong[:20])


def test_runs_in_the_middle_of_a_tensor(device: torch.device) -> None:
    """Any place, also beyond what 32 bits count; and regions add up."""
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    chance = random.Random(seed)
    launch = fingerprints._kernel(device)
    assert launch is not None
    for width in (1, 2, 4, 8):
        data = noise(50_000 * width, torch.uint8, width)
        there = data.to(device)
        runs = []
        for number in range(60):
            start = chance.choice([0, 8, 32, (1 << 31) - 40, 1 << 33]) + chance.choice([0, 16, 7])
            skipped, count = chance.randrange(100), chance.randrange(1, 40_000)
            runs.append(Run(skipped * width, count, width, start, number))
        expected = np.zeros(len(runs), np.int64)
        add_digests([r._replace(address=r.address + data.data_ptr()) for r in runs], expected, 4)
        found = torch.zeros(len(runs), dtype=torch.int64, device=device)
        launch(*table([r._replace(address=r.address + there.data_ptr()) for r in runs]), found)
        wrong = [
            r for r, a, b in zip(runs, expected.tolist(), found.tolist(), strict=True) if a != b
        ]
        assert not wrong, f"{len(wrong)} of {len(runs)}, first {wrong[0]}"


def test_what_moves_is_found(device: torch.device) -> None:
    flat = torch.randn(1 << 20, device=device)
    square = flat.view(1024, 1024)
    moved = [flat.roll(1), flat.flip(0), flat.roll(1 << 19), square.t(), square.roll(1, 0)]
    numbers = digest_tensors([flat, *moved]).tolist()
    assert len(set(numbers)) == len(numbers)


def test_many_tensors(device: torch.device) -> None:
    """More than a launch takes, of several types, small and large."""
    here = [noise(1 + i % 7 * 500, DTYPES[i % len(DTYPES)], i) for i in range(500)]
    there = [t.to(device) for t in here]
    assert digest_tensors(there).tolist() == digest_tensors(here).tolist()
    assert in_plain_torch(there).tolist() == digest_tensors(here).tolist()


@pytest.mark.parametrize("way", [digest_tensors, in_plain_torch])
def test_the_host_does_not_wait(way: Callable[..., torch.Tensor], device: torch.device) -> None:
    tensors = [torch.randn(3000, 1000, device=device), torch.ones((), device=device)]
    tensors += [tensors[0].t(), tensors[0][:, ::2]]
    way(tensors)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        way(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("way", [digest_tensors, in_plain_torch])
def test_it_needs_little_memory(way: Callable[..., torch.Tensor], device: torch.device) -> None:
    """Also of what is not contiguous."""
    large = torch.randn(64 << 20, device=device)
    for tensor in (large, large.view(1024, -1).t(), large.view(4, -1, 1024).transpose(1, 2)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        way([tensor])
        extra = torch.cuda.max_memory_allocated(device) - before
        print(f"{way.__name__} {tuple(tensor.shape)} {tensor.stride()}: {extra / 2**20:.1f} MiB")
        assert extra <= MEMORY_MAX


def test_on_another_stream_and_thread(device: torch.device) -> None:
    """Hooks of backward run in a thread of torch's own."""
    flat = noise(300_000, torch.float32, 5)
    expected = digest_tensors([flat]).tolist()
    found: list[list[int]] = []

    def work() -> None:
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            found.append(digest_tensors([flat.to(device)]).tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [expected]


def test_a_swap_that_nobody_announced(tmp_path: Path) -> None:
    """On a GPU a write through `.data` leaves no trace: the next fingerprint finds it, and it is repaired."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 4)).cuda()
    frozen = model[1].requires_grad_(False).weight
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with everystep.attach(
        model,
        optimizer,
        run=tmp_path / "run",
        every=1,
        tuning=everystep.Tuning(fingerprint_every=2),
        on_failure="raise",
    ) as run:
        for step in run.steps(40):
            if step == 10:
                frozen.data.copy_(frozen.data.roll(128, 0))
            model(torch.randn(8, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        deadline = time.monotonic() + 30
        while not run.status()["repairs"]:
            assert time.monotonic() < deadline, run.status()
            time.sleep(0.02)
        assert run.status()["repaired"] == ["1.weight"]
        run.flush()
    expected = frozen.detach().clone()
    with torch.no_grad():
        frozen.zero_()
    assert everystep.restore(tmp_path / "run", model) == 40
    assert torch.equal(frozen, expected)


def seconds(work: Callable[[], object], repeats: int = 10) -> tuple[float, float]:
    """Of the device, and of the host until all is queued; the best of several."""
    work()
    best = [float("inf")] * 2
    for _ in range(repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        before.record()
        work()
        after.record()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        best = [min(best[0], before.elapsed_time(after) / 1e3), min(best[1], host)]
    return best[0], best[1]


def test_what_it_takes(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not judged: beside the sum of words that a digest was before."""
    raw = torch.randint(-(1 << 62), 1 << 62, (1 << 27,), device=device)
    one = torch.zeros(1, device=device)
    rows = [("sum of words", seconds(lambda: torch.sum(raw, 0)))]
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float64):
        tensor = raw.view(dtype)
        rows.append((f"kernel {dtype}", seconds(lambda tensor=tensor: digest_tensors([tensor]))))
    unaligned = raw.view(torch.float32)[1:]
    rows.append(("kernel, 4 bytes off", seconds(lambda: digest_tensors([unaligned]))))
    rows.append(("plain torch", seconds(lambda: in_plain_torch([raw.view(torch.float32)]), 3)))
    pieces = list(raw.view(torch.float32).chunk(256))
    rows.append(("256 tensors of 4 MiB", seconds(lambda: digest_tensors(pieces))))
    rows.append(
        ("their sums of words", seconds(lambda: [p.view(torch.int64).sum() for p in pieces]))
    )
    small = [torch.ones((), device=device) for _ in range(600)]
    rows.append(("600 single numbers", seconds(lambda: digest_tensors(small))))
    rows.append(("600 stacked", seconds(lambda: torch.stack(small))))
    rows.append(("1 number", seconds(lambda: digest_tensors([one]))))
    rows.append(("its sum", seconds(lambda: one.view(torch.int32).sum(dtype=torch.int64))))
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name(device)}, 1 GiB where nothing else is said")
        for name, (on_device, on_host) in rows:
            rate = raw.nbytes / on_device / 1e9
            print(
                f"{name:24} device {on_device * 1e6:9.0f} us ({rate:5.0f} GB/s), host {on_host * 1e6:8.0f} us"
            )
