"""Disks that are full or read-only, too little memory of every kind: training goes on or is told why.

Small file systems are mounted for it, which needs root; without it these tests say so and skip.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import everystep
from everystep import connection
from everystep.errors import NotEnoughDisk, NotEnoughMemory
from everystep.lane.host import read_facts

from .traces import adam, bits, leaves_nothing, model, shadows, train_step

HEAL_SECONDS = 90.0


def run_or_skip(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(words[:3])} is not permitted: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    run_or_skip("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


class Training:
    def __init__(self, run: Path, **options: Any) -> None:
        self.net = model()
        self.optimizer = adam(self.net)
        given = {"every": 1, **options}
        self.run = everystep.attach(self.net, self.optimizer, run=run, **given)

    def go(self, steps: int) -> None:
        for _ in self.run.steps(self.run.step + steps):
            train_step(self.net, self.optimizer)

    def until(self, done: Callable[[dict[str, Any]], object], what: str) -> dict[str, Any]:
        """Train on until status says so."""
        deadline = time.monotonic() + HEAL_SECONDS
        while not done(status := self.run.status()):
            assert time.monotonic() < deadline, f"waited for {what}: {status}"
            self.go(1)
            time.sleep(0.05)
        return status

    def check_durable(self, step: int) -> None:
        other = model()
        assert everystep.restore(self.run.path, other) == step
        assert bits(other) == bits(self.net)


def degraded(status: dict[str, Any]) -> bool:
    return status["health"] == "degraded"


def check_heals(training: Training, mend: Callable[[], object], reason: str) -> None:
    """Degraded, saying why, while training goes on; mended, a base lands and all is well again."""
    status = training.until(degraded, "status to say degraded")
    assert reason in status["problem"], status["problem"]
    before = training.run.step
    training.go(10)
    assert training.run.step == before + 10
    durable = status["durable_step"] or 0
    mend()
    status = training.until(
        lambda s: s["health"] == "ok" and (s["durable_step"] or 0) > max(durable, before), "a base"
    )
    assert status["problem"] == "" and status["records_dropped"] == 0
    training.run.flush()
    training.check_durable(training.run.step)
    training.run.close()


def test_disk_that_no_base_fits_on(disk: Path, runtime: Path) -> None:
    """Before training there is nothing to lose: the call is refused, with figures."""
    net = model(20_000)
    with (
        leaves_nothing(runtime, disk / "run", net),
        pytest.raises(NotEnoughDisk, match=r"MiB at least, .* free") as caught,
    ):
        everystep.attach(net, adam(net), run=disk / "run")
    assert "prune" in (caught.value.hint or "")


def test_full_disk_from_the_start(disk: Path) -> None:
    """A base might just fit, going by its tensors, and does not."""
    ballast = disk / "ballast"
    with ballast.open("wb") as file, pytest.raises(OSError, match="No space"):
        file.write(bytes(2 << 20))
    with ballast.open("r+b") as file:
        file.truncate(ballast.stat().st_size - 8192)
    training = Training(disk / "run", durable_every=3, on_lag="wait")
    check_heals(training, ballast.unlink, "No space left")


def test_disk_that_fills_up(disk: Path) -> None:
    """What was durable before stays so, byte for byte, and half a base leaves no rubbish."""
    training = Training(disk / "run", durable_every="1h", on_lag="wait")
    training.go(4)
    training.run.flush()
    training.check_durable(4)
    ballast = disk / "ballast"
    with ballast.open("wb") as file, pytest.raises(OSError, match="No space"):
        file.write(bytes(2 << 20))
    training.go(4)
    with pytest.raises(everystep.EverystepError, match="No space left") as caught:
        training.run.flush()
    assert "training goes on" in (caught.value.hint or "")
    stored = everystep.open_run(disk / "run")
    assert stored.steps[-1] == 4 and stored.verify().problems == []
    assert len(list((disk / "run").glob("terms/*/bases/*"))) == len(stored.bases)
    ballast.unlink()
    deadline = time.monotonic() + HEAL_SECONDS
    while everystep.open_run(disk / "run").steps[-1] < 8:
        assert time.monotonic() < deadline, training.run.status()
        training.go(1)
        try:
            training.run.flush()
        except everystep.EverystepError:
            time.sleep(0.1)
    assert training.run.status()["health"] == "ok"
    training.check_durable(training.run.step)
    training.run.close()


def test_log_that_would_fill_the_disk(disk: Path) -> None:
    """It leaves room for a base: behind that one the log before it goes, and it goes on by itself."""
    training = Training(
        disk / "run", durable_log=1, durable_every="1h", keep=everystep.Keep(last=1), on_lag="wait"
    )
    problems = set()

    def look(status: dict[str, Any]) -> bool:
        problems.add(status["problem"])
        return status["bases_written"] >= 4

    status = training.until(look, "bases that the log has asked for")
    assert any("the next base takes" in problem for problem in problems), problems
    assert not any("No space left" in problem for problem in problems), problems
    training.until(
        lambda s: s["health"] == "ok" and s["durable_step"] > status["durable_step"],
        "the log to go on",
    )
    training.run.close()
    other = model()
    assert everystep.restore(disk / "run", other, adam(other)) == training.run.step
    assert bits(other) == bits(training.net)


def test_log_on_a_disk_that_others_fill(disk: Path) -> None:
    """What was logged before stays; training goes on; with room again, so does the log."""
    training = Training(disk / "run", durable_log=1, durable_every="1h", on_lag="wait")
    seen = {}

    def go_on(status: dict[str, Any]) -> bool:
        seen[training.run.step] = bits(training.net)
        return degraded(status)

    training.until(
        lambda s: (s["durable_step"] or 0) > (s["based_step"] or 0), "a log behind a base"
    )
    ballast = disk / "ballast"
    with ballast.open("wb") as file, pytest.raises(OSError, match="No space"):
        file.write(bytes(2 << 20))
    status = training.until(go_on, "the log to end")
    training.go(10)
    other = model()
    step = everystep.restore(disk / "run", other, adam(other))
    assert step >= max(1, status["durable_step"])
    assert step not in seen or bits(other) == seen[step]
    ballast.unlink()
    training.run.flush()
    based = training.run.step
    training.until(lambda s: s["health"] == "ok" and s["durable_step"] > based, "the log to go on")
    training.run.close()
    other = model()
    assert everystep.restore(disk / "run", other, adam(other)) == training.run.step
    assert bits(other) == bits(training.net)


def test_read_only_disk(disk: Path) -> None:
    run_or_skip("mount", "-o", "remount,ro", str(disk))
    training = Training(disk / "run", durable_every=3, on_lag="wait")
    mend = lambda: run_or_skip("mount", "-o", "remount,rw", str(disk))  # noqa: E731
    check_heals(training, mend, "Read-only")


def test_a_shadow_that_may_write_nothing_takes_over(runtime: Path, tmp_path: Path) -> None:
    """Its disk fills up between its start and the end of the one before: it cannot write where it is found,
    and had waited for that for ever, as had the shadow before it and whoever attached."""
    net = model()
    *trained, last = net.parameters()
    last.requires_grad_(False)
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    with (
        pytest.raises(RuntimeError, match="crash"),
        everystep.attach(net, optimizer, run=tmp_path / "run", on_lag="wait") as run,
    ):
        for step in run.steps(9):
            if step == 3:
                last.requires_grad_(True)
                optimizer.add_param_group({"params": [last]})
            if step == 4:
                pid = run.status()["pid"]
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            if step == 7:
                raise RuntimeError("crash")
            train_step(net, optimizer)
    other = model()
    its = torch.optim.SGD(list(other.parameters())[:-1], lr=0.1, momentum=0.9)
    began = time.monotonic()
    with everystep.attach(other, its, run=tmp_path / "run") as resumed:
        assert resumed.step == 7 and time.monotonic() - began < HEAL_SECONDS / 2
        assert bits(other) == bits(net)
    assert not list(runtime.rglob("shadow.json*"))


def test_a_shadow_that_cannot_hand_over_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It had tried again without a word, and whoever attached waited for two minutes."""

    def life() -> everystep.Run:
        net = model()
        optimizer = Logged(net.parameters(), lr=0.1)
        with everystep.attach(net, optimizer, run=tmp_path / "run", durable_every=100) as run:
            for step in run.steps(6 if run.step == 0 else 0):
                if step == 2:
                    run.flush()
                if step == 4:
                    pid = run.status()["pid"]
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
                train_step(net, optimizer)
        return run

    with pytest.warns(UserWarning, match="File too large"):
        life()
    began = time.monotonic()
    with pytest.warns(UserWarning, match="limited to 0.0 MiB by RLIMIT_FSIZE"):
        assert life().step == 2
    assert time.monotonic() - began < HEAL_SECONDS / 2
    assert "at step 2 from the store (exact); 4 steps lost" in capsys.readouterr().err


class Logged(torch.optim.SGD):
    """Of a class that no shadow knows: its steps are kept as gradients, and handed over."""


def test_too_little_host_memory(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()

    def with_bytes(available: int) -> None:
        facts = msgspec.structs.replace(read_facts(), memory_available_bytes=available)
        monkeypatch.setattr(connection, "read_facts", lambda: facts)

    for available in (0, 1000, 200_000):
        with_bytes(available)
        with (
            leaves_nothing(runtime, tmp_path / "run", net),
            pytest.raises(NotEnoughMemory, match=r"needs|needed") as caught,
        ):
            everystep.attach(net, adam(net), run=tmp_path / "run")
        assert "MiB" in str(caught.value) and "arena_dir" in (caught.value.hint or "")
    with_bytes(1 << 20)  # enough, but for fewer slots
    optimizer = adam(net)
    with everystep.attach(net, optimizer, run=tmp_path / "run", on_lag="wait") as run:
        for _ in run.steps(30):
            train_step(net, optimizer)
        assert 2 <= run.status()["ring_slots"] < 16
    other = model()
    assert everystep.restore(tmp_path / "run", other) == 30 and bits(other) == bits(net)


def test_arena_that_does_not_exist_or_is_too_small(
    runtime: Path, tmp_path: Path, disk: Path
) -> None:
    net = model()
    with (disk / "ballast").open("wb") as file:
        file.write(bytes(900 << 10))
    for arena, words in ((tmp_path / "nowhere", "No such file"), (disk, "MiB")):
        with (
            leaves_nothing(runtime, tmp_path / "run", net),
            pytest.raises(NotEnoughMemory, match=words) as caught,
        ):
            everystep.attach(
                net, adam(net), run=tmp_path / "run", tuning=everystep.Tuning(arena_dir=str(arena))
            )
        assert caught.value.hint


def test_arena_on_a_disk_works(runtime: Path, tmp_path: Path) -> None:
    arena = tmp_path / "arena"
    arena.mkdir()
    training = Training(
        tmp_path / "run", tuning=everystep.Tuning(arena_dir=str(arena)), on_lag="wait"
    )
    training.go(5)
    (pid,) = shadows(runtime)
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert str(arena) in maps and "memfd:everystep" not in maps
    assert str(arena) in Path("/proc/self/maps").read_text()
    training.run.close()
    training.check_durable(5)
    assert list(arena.iterdir()) == [], "files were left in the arena"


TINY_SHM = """
import sys
sys.path.insert(0, sys.argv[2])
import os, everystep
from hostile.traces import adam, model, train_step
left = os.statvfs("/dev/shm")
assert left.f_blocks * left.f_frsize <= 1 << 16
net = model(); optimizer = adam(net)
with everystep.attach(net, optimizer, run=sys.argv[1]) as run:
    for step in run.steps(6):
        train_step(net, optimizer)
"""


def test_dev_shm_too_small(tmp_path: Path) -> None:
    """Memory comes from memfd: a container's tiny /dev/shm does not matter."""
    run_or_skip("unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm")
    here = Path(__file__).resolve().parent.parent
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" -c "$1" "$2" "$3"'
    words = ["unshare", "--mount", "sh", "-c", script, sys.executable, TINY_SHM]
    done = subprocess.run(
        [*words, str(tmp_path / "run"), str(here)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert everystep.open_run(tmp_path / "run").steps[-1] == 6
