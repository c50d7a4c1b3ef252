"""What a durable log costs and brings: its size, how fast it is written, and how long its replay takes."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import everystep
from everystep.bench.clock import timed
from everystep.bench.gpt import Training
from everystep.bench.links import disk
from everystep.bench.place import temporary_place
from everystep.capture.census import take_census
from everystep.core.census import Census
from everystep.format.log import LoggedRecord, census_digest
from everystep.recover.find import find_newest
from everystep.recover.loader import Loader
from everystep.store import layout
from everystep.store.disk.files import RunPath, replace_file, size_of, temporary_for
from everystep.store.disk.mapped import map_file
from everystep.store.disk.stream import StreamWriter
from everystep.store.log import LogWriter
from everystep.store.runs import claim_term

_DISK_BYTES = 2 << 30
_BATCH_BYTES = 512 << 20  # what is gathered before a sync, at least
_WAIT_SECONDS = 120.0
_ROUNDS = 5  # a disk that others use too changes its rate by half from one second to the next


def log_cost(
    model: str,
    batch: int,
    optimizer: str,
    steps: int,
    compression: str,
    ratio: float,
    folder: Path | None,
) -> dict[str, Any]:
    training = Training(model, batch, optimizer, compiled=False)
    if compression:
        everystep.compress(training.optimizer, compression, ratio=ratio)
    with temporary_place(folder) as place:
        run = place / "run"
        trained = _train(training, run, steps)
        found = {"model": model, "compression": compression or "none", **trained}
        found |= _replay(training, run, steps)
        found["replay_is_faster"] = found["trained_seconds"] / found["replay_seconds"]
        dense = sum(p.nbytes for p in training.model.parameters())
        rounds = [_rates(place, dense) for _ in range(_ROUNDS)]
        written, best, read = (statistics.median(column) for column in zip(*rounds, strict=True))
        return {
            **found,
            "log_write_bytes_per_second": written,
            "disk_write_bytes_per_second": best,
            "write_share_percent": 100 * written / best,
            "write_share_percent_each": [100 * log / most for log, most, _ in rounds],
            "disk_read_bytes_per_second": read,
            "base_load_share_percent": 100 * found["base_load_bytes_per_second"] / read,
        }


def _train(training: Training, run: Path, steps: int) -> dict[str, Any]:
    """A base, then `steps` steps in the log alone. The shadow is killed, so that no other base follows."""
    for _ in range(3):
        training.step()
    seconds = timed(training.device.type == "cuda", training.step, lambda n: n < 10)
    attached = everystep.attach(
        training.model,
        training.optimizer,
        run=run,
        every=1,
        durable_log=1,
        durable_every="1h",
        on_lag="wait",
        on_failure="raise",
    )
    attached.resume()
    attached.flush()
    before = attached.status()
    start = attached.step
    for _ in range(steps):
        training.step()
        attached.seal()
    deadline = time.monotonic() + _WAIT_SECONDS
    while (status := attached.status())["durable_step"] != start + steps:
        if time.monotonic() > deadline:
            raise everystep.EverystepError(f"bench log: the log ends at {status['durable_step']}")
        time.sleep(0.05)
    os.kill(status["pid"], signal.SIGKILL)
    written = sum(map(size_of, layout.segments(run, status["term"])))
    state = sum(t.nbytes for t in training.tensors())
    return {
        "steps": steps,
        "iteration_seconds": statistics.mean(seconds),
        "trained_seconds": statistics.mean(seconds) * steps,
        "state_bytes": state,
        "log_bytes_per_step": (status["log_bytes_written"] - before["log_bytes_written"]) / steps,
        "log_bytes": written,
        "state_is_larger": state
        * steps
        / (status["log_bytes_written"] - before["log_bytes_written"]),
    }


def _replay(training: Training, run: Path, steps: int) -> dict[str, Any]:
    """Loading the base, and what the log takes on top of that."""
    expected = [t.clone() for t in training.tensors()]
    base = everystep.open_run(run).steps[-1]
    _forget(RunPath(path.parent) / path.name for path in run.rglob("*") if path.is_file())
    cold, _ = _restore(training, run, base)
    each, identical = [], True
    for _ in range(_ROUNDS):
        warm, _ = _restore(training, run, base)
        _rewrite(_segments(run))
        both, reached = _restore(training, run, None)
        pairs = zip(expected, training.tensors(), strict=True)
        identical &= all(torch.equal(a, b) for a, b in pairs)
        each.append(both - warm)
    in_memory, _ = _restore(training, run, None)
    return {
        "base_step": base,
        "reached_step": reached,
        "bit_identical": identical,
        "base_load_seconds": cold,
        "base_load_bytes_per_second": sum(t.nbytes for t in expected) / cold,
        "replay_seconds": statistics.median(each),
        "replay_seconds_each": each,
        "replay_seconds_per_step": statistics.median(each) / steps,
        "replay_seconds_without_the_disk": in_memory - warm,
    }


def _restore(training: Training, run: Path, step: int | None) -> tuple[float, int]:
    """What `everystep.restore` does, and how long it took."""
    for tensor in training.tensors():
        tensor.zero_()
    live = take_census(training.model, training.optimizer)
    began = time.perf_counter()
    found, _ = find_newest(run, None, step, verify_lazily=True)
    assert found is not None, f"{run} holds no base"
    Loader(found, live, run).load()
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, found.point.step


def _segments(run: Path) -> list[RunPath]:
    return [path for term in layout.term_numbers(run) for path in layout.segments(run, term)]


def _forget(paths: Iterable[RunPath]) -> None:
    """Whoever reads them next has to go to the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _rewrite(paths: Iterable[RunPath]) -> None:
    """Elsewhere on the disk: what was read once may come again from some memory below this system."""
    for path in paths:
        copy = temporary_for(path)
        writer = StreamWriter(copy)
        writer.append(map_file(path))
        writer.finish()
        writer.close()
        replace_file(copy, path)
        _forget([path])


def _rates(place: Path, record_bytes: int) -> tuple[float, float, float]:
    """Of a log, of the disk's best way to write, and of reading, one right behind the other."""
    raw = disk(place, _DISK_BYTES)
    with tempfile.TemporaryDirectory(prefix="written-", dir=place) as folder:
        return _write_rate(Path(folder), record_bytes), raw["best"], raw["read"]


def _write_rate(run: Path, record_bytes: int) -> float:
    """How fast batches of this model's dense records are written, each batch with its sync."""
    manifest = claim_term(run, None)
    census = census_digest(Census((), (), "exact"))
    writer = LogWriter(run, manifest.run_id, manifest.term, census)
    body = memoryview(os.urandom(1 << 20) * -(-record_bytes // (1 << 20)))[:record_bytes]
    batch = -(-_BATCH_BYTES // record_bytes)
    count = -(-_DISK_BYTES // (batch * record_bytes)) * batch
    began = time.perf_counter()
    for first in range(0, count, batch):
        writer.append([LoggedRecord(s + 1, s, body) for s in range(first, first + batch)])
    seconds = time.perf_counter() - began
    writer.close()
    return count * record_bytes / seconds
