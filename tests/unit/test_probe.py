"""Measuring the disk of a run leaves nothing behind and takes no room that the run needs."""

from __future__ import annotations

import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from everystep.core.limits import Limits
from everystep.errors import NotEnoughDisk
from everystep.options import Options, Tuning
from everystep.shadow import tuning
from everystep.store.disk import meter as meters
from everystep.store.disk import probe
from everystep.store.disk.meter import Meter
from everystep.store.disk.stream import StreamWriter

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_WRITE_BYTES", 2 * MIB)
    monkeypatch.setattr(probe, "BUFFER_BYTES", MIB)


def test_whatever_ends_it_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    plain = StreamWriter.drain

    def drain(self: StreamWriter) -> None:
        seen.extend(tmp_path.iterdir())
        plain(self)

    monkeypatch.setattr(StreamWriter, "drain", drain)
    meter = Meter()
    disk = probe.measure_disk(tmp_path, meter)
    assert disk.sync_seconds > 0 and disk.write_bytes_per_second > 0
    assert not seen and not list(tmp_path.iterdir()), (
        "a process that ends meanwhile removes nothing"
    )
    assert meter.total == 7 * MIB


@pytest.mark.parametrize(
    "limits", [Limits(store_quota=5 * MIB), Limits(disk_bytes_per_day=5 * MIB), Limits()], ids=repr
)
def test_where_room_is_short_nothing_is_written(
    limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    if limits == Limits():
        monkeypatch.setattr(meters.shutil, "disk_usage", lambda _: usage(5 * MIB))
    meter = Meter(limits)
    with pytest.raises(NotEnoughDisk):
        probe.measure_disk(tmp_path, meter)
    assert meter.total == 0


def test_a_slow_limit_is_taken_for_the_disk(tmp_path: Path) -> None:
    began = time.monotonic()
    disk = probe.measure_disk(tmp_path, Meter(Limits(disk_bytes_per_second=1000)))
    assert disk.write_bytes_per_second == 1000 and time.monotonic() - began < 60


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), ValueError("no"), MemoryError()]
)
def test_a_measurement_that_fails_is_tried_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    done = threading.Event()

    def measure(*args: Any) -> probe.Disk:
        asked.append(args)
        if len(asked) == 1:
            raise error
        done.set()
        return probe.Disk(1.0, 1.0)

    monkeypatch.setattr(tuning, "measure_disk", measure)
    it = tuning.Tuner.__new__(tuning.Tuner)
    it._config = SimpleNamespace(run=str(tmp_path))  # type: ignore[assignment]
    it._options = Options(tuning=Tuning(mtbf="1h"))
    it._base_writer = SimpleNamespace(meter=Meter())  # type: ignore[assignment]
    it._probe, it._disk, it._next_fit = None, None, 0.0
    it._begin_probe()
    wait_until(lambda: it._probe is None or not it._probe.is_alive(), "the probe", 10)
    assert it._next_fit > time.monotonic() and "cannot be measured" in it._why
    it._begin_probe()
    assert done.wait(10)
