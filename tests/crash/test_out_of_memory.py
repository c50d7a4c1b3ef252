"""Memory runs out in the cgroup that trainer and shadow share: the kernel ends the trainer. The shadow, which
uses more memory, stays and holds the state."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from waiting import wait_until

import everystep
from everystep.lane.cgroup import _folders
from everystep.lane.control import AskStatus, ask
from everystep.lane.runtime import read_card, runtime_dir
from everystep.process.oom_score import oom_score_adj
from everystep.recover.find import find_newest

from .processes import shadows

STEPS = 3
# The frozen weights lie in a file, and their pages are given back after the last step: so the shadow is the
# largest process, as it is beside a GPU. What eats the memory up belongs to no process in particular.
TRAINER = """
import mmap, os, resource, sys
from pathlib import Path
import torch
import everystep

run, cgroup, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
(cgroup / "cgroup.procs").write_text(str(os.getpid()))
Path("/proc/self/oom_score_adj").write_text("500")  # as choom does: what was raised may be lowered again
size = 3 * 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2
name = next(n for n in ("memory.max", "memory.limit_in_bytes") if (cgroup / n).exists())
(cgroup / name).write_text(str(3 * size))

with open(run + ".weights", "w+b") as file:
    file.truncate(size)
    mapped = mmap.mmap(file.fileno(), size)
model = torch.nn.Linear(4, 4)
model.frozen = torch.nn.Parameter(torch.frombuffer(mapped, dtype=torch.uint8), requires_grad=False)
optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
training = everystep.attach(model, optimizer, run=run, every=1, durable_every="1h", on_lag="wait")
for _ in training.steps(steps):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
training.flush()
print(training.status()["outlives_oom"], flush=True)
mapped.madvise(mmap.MADV_DONTNEED)
memory = os.memfd_create("leak")
while os.write(memory, bytes(1 << 20)):
    pass
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of our own inside the one that we are in."""
    made = None
    for parent in _folders(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text()):
        folder = parent / f"everystep-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        names = {path.name for path in folder.iterdir()}
        if names & {"memory.max", "memory.limit_in_bytes"}:
            made = folder
            break
        folder.rmdir()
    if made is None:
        pytest.skip(
            "no memory cgroup can be made here: it takes root and a writable /sys/fs/cgroup"
        )
    yield made
    procs = made / "cgroup.procs"
    for pid in procs.read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not procs.read_text().split(), "the cgroup to be empty")
    made.rmdir()


def test_the_trainer_is_killed_and_the_shadow_keeps_its_state(
    cgroup: Path, runtime: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-c", TRAINER, str(run), str(cgroup), str(STEPS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    card = read_card(runtime_dir(str(run)))
    assert shadows(runtime) and card is not None, "the shadow was killed"
    assert done.stdout.split() == ["True"]
    wait_until(
        lambda: ask(card.control, AskStatus(), timeout_seconds=10).status["trainer_pid"] is None,
        "the shadow to notice",
    )
    found, _ = find_newest(run, runtime_dir(str(run)))
    assert found is not None and (found.source, found.point.step) == ("shadow", STEPS)
    found.close()


def test_a_shadow_lowers_its_score(tmp_path: Path) -> None:
    """Also where no cgroup can be made to try it out. What was raised may be lowered again without rights."""
    file, before = Path("/proc/self/oom_score_adj"), oom_score_adj()
    file.write_text(str(before + 100))
    try:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with everystep.attach(model, optimizer, run=tmp_path / "run", every=1) as training:
            shadow = Path(f"/proc/{training.status()['pid']}/oom_score_adj")
            assert oom_score_adj(shadow) < oom_score_adj() == before + 100
    finally:
        file.write_text(str(before))
