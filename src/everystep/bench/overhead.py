"""`everystep bench overhead`: what a checkpoint every k steps costs, ours and the peers', in one run.

Windows of steps without checkpointing lie between the others, so that drift of the machine shows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import everystep
from everystep.bench.clock import Clock
from everystep.bench.gpt import Training
from everystep.bench.methods import METHODS, Method, Nothing, installed
from everystep.bench.place import temporary_place
from everystep.errors import EverystepError, UsageError

_WARM_UP_STEPS = 3
_WARM_UP_SECONDS = 120.0
# a peer that does not work here is reported, and the others are measured all the same
_PEER_ERRORS = (
    *(AssertionError, AttributeError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


class Settings(NamedTuple):
    model: str
    batch: int
    every: int
    steps: int
    optimizer: str
    methods: tuple[str, ...]
    compiled: bool
    busy_loader: bool
    patience_seconds: float  # a window ends after this long, however few steps it has seen
    folder: Path | None
    compression: str = ""  # a method of everystep.compress; "": gradients are left alone
    ratio: float = 0.01


class Window(NamedTuple):
    """What one window of steps took."""

    method: str
    seconds: list[float]
    peak_bytes: int
    driver_bytes: int
    cpu_seconds: float
    host_bytes: int
    figures: dict[str, Any]


def overhead(settings: Settings, say: Any) -> dict[str, Any]:
    """Measure every method that is installed; returns the document."""
    unknown = [name for name in settings.methods if name not in METHODS]
    if unknown:
        raise UsageError(
            f"bench overhead: no method {unknown[0]!r}", hint=f"one of {', '.join(METHODS)}"
        )
    training = Training(
        settings.model, settings.batch, settings.optimizer, compiled=settings.compiled
    )
    order = [name for name in settings.methods if name != "none" and installed(name)]
    missing = [name for name in settings.methods if not installed(name)]
    windows: list[Window] = []
    failed: dict[str, str] = {}
    with _busy_loader(settings.busy_loader):
        for _ in range(_WARM_UP_STEPS):
            training.step()
        if settings.compression:
            windows.append(_window("uncompressed", training, settings))
            everystep.compress(training.optimizer, settings.compression, ratio=settings.ratio)
            for _ in range(_WARM_UP_STEPS):
                training.step()
        windows.append(_window("none", training, settings))
        for name in order:
            try:
                windows.append(_window(name, training, settings))
            except _PEER_ERRORS as error:
                failed[name] = f"{type(error).__name__}: {error}".strip().splitlines()[-1]
                say(f"{name:>20}: {failed[name]}")
                continue
            say(_line(windows[-1], windows))
            windows.append(_window("none", training, settings))
            say(_line(windows[-1], windows))
    return {**_document(settings, training, windows), "not_installed": missing, "failed": failed}


def _window(name: str, training: Training, settings: Settings) -> Window:
    with temporary_place(settings.folder) as folder:
        make = Nothing if name == "uncompressed" else METHODS[name][0]
        method = make(training, folder, settings.every)
        try:
            return _measured(name, method, training, settings)
        except BaseException:
            with contextlib.suppress(EverystepError):
                method.close()
            raise


def _measured(name: str, method: Method, training: Training, settings: Settings) -> Window:
    step = _warm_up(method, training)
    cuda = training.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    clock, driver = Clock(cuda), 0
    cpu, began = _cpu_seconds(), time.monotonic()
    for _ in range(settings.steps):
        training.step()
        method.after_step(step)
        step += 1
        clock.tick()
        if cuda and step % 8 == 0:
            free, total = torch.cuda.mem_get_info()
            driver = max(driver, total - free)
        if time.monotonic() - began > settings.patience_seconds:
            break
    seconds = clock.seconds()
    cpu = _cpu_seconds() - cpu
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = method.close()
    return Window(name, seconds, peak, driver, cpu, host, figures)


def _warm_up(method: Method, training: Training) -> int:
    """Steps until the method does what it does in the long run; returns the next step's number."""
    deadline = time.monotonic() + _WARM_UP_SECONDS
    step = 1
    while step <= _WARM_UP_STEPS or not method.warm_up_ended():
        training.step()
        method.after_step(step)
        step += 1
        if time.monotonic() > deadline:
            break
    return step


def _cpu_seconds() -> float:
    """Of this process and of every other one of this user: a shadow is nobody's child."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _burn() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    table = list(range(1 << 16))
    while True:
        table.sort(key=lambda x: (x * 2654435761) & 0xFFFF)


@contextlib.contextmanager
def _busy_loader(wanted: bool) -> Iterator[None]:
    """Half the cores decode data, as a heavy loader's workers would."""
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=_burn, daemon=True)
        for _ in range(max(1, (os.cpu_count() or 1) // 2) if wanted else 0)
    ]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        for worker in workers:
            worker.kill()


def _ratio(index: int, windows: list[Window]) -> float:
    """Mean iteration against the windows without checkpointing right before and after."""
    beside = [w for w in windows[max(0, index - 1) : index + 2] if w.method == "none"]
    base = statistics.mean(statistics.mean(w.seconds) for w in beside)
    return statistics.mean(windows[index].seconds) / base


def _line(window: Window, windows: list[Window]) -> str:
    ratio = _ratio(len(windows) - 1, windows)
    return (
        f"{window.method:>20}: {1000 * statistics.median(window.seconds):8.1f} ms median, "
        f"{len(window.seconds)} steps, {ratio:.4f} x the window before"
    )


def _document(settings: Settings, training: Training, windows: list[Window]) -> dict[str, Any]:
    plain = [w for w in windows if w.method == "none"]
    base_peak = max(w.peak_bytes for w in plain)
    base_driver = max(w.driver_bytes for w in plain)
    means = [statistics.mean(w.seconds) for w in plain]
    methods: dict[str, Any] = {}
    for name in dict.fromkeys(w.method for w in windows):
        own = [(i, w) for i, w in enumerate(windows) if w.method == name]
        seconds = [s for _, w in own for s in w.seconds]
        ratios = [_ratio(i, windows) for i, _ in own] if name != "none" else [1.0]
        methods[name] = {
            "median_seconds": statistics.median(seconds),
            "p99_seconds": sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))],
            "steps": len(seconds),
            "ratio": statistics.mean(ratios),
            "median_ratio": statistics.median(seconds)
            / statistics.median(s for w in plain for s in w.seconds),
            "peak_gpu_bytes": max(w.peak_bytes for _, w in own),
            "peak_gpu_bytes_more": max(w.peak_bytes for _, w in own) - base_peak,
            "driver_gpu_bytes": max(w.driver_bytes for _, w in own),
            "driver_gpu_bytes_more": max(w.driver_bytes for _, w in own) - base_driver,
            "host_bytes": max(w.host_bytes for _, w in own),
            "cpu_seconds_per_step": sum(w.cpu_seconds for _, w in own) / len(seconds),
            **own[-1][1].figures,
        }
    spread = (max(means) - min(means)) / statistics.mean(means)
    return {
        "model": settings.model,
        "parameters": training.parameters,
        "batch": settings.batch,
        "every": settings.every,
        "optimizer": settings.optimizer,
        "compression": settings.compression,
        "compiled": settings.compiled,
        "busy_loader": settings.busy_loader,
        "device": torch.cuda.get_device_name() if training.device.type == "cuda" else "cpu",
        "torch": str(torch.__version__),
        "none_spread": spread,  # how far the windows without checkpointing lie apart
        "methods": methods,
    }
