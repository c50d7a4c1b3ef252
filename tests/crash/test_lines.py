"""Which term a run goes on behind when shadows claim late: before, while, and after training goes back, and
when one hands its state on before it could claim at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

import everystep
from everystep.store.layout import term_numbers
from everystep.store.runs import read_lineage, read_manifest

from .jobs import Job
from .processes import shadows

# a shadow cannot make the folder of a term as long as a file says so
_REFUSES = """
import os
plain = os.mkdir
def mkdir(path, *args, **more):
    if os.path.exists({block!r}) and os.path.basename(path).isdigit():
        raise OSError(28, "No space left on device (planted)")
    return plain(path, *args, **more)
os.mkdir = mkdir
"""


def counting(run: Path) -> list[tuple[int, int]]:
    return [(c.term, c.entry.step) for c in read_lineage(run).candidates]


def trained(run: everystep.Run, job: Job, to: int) -> None:
    """Every step is made durable."""
    for step in run.steps(to):
        if step:
            run.flush()
        job.step()
    run.flush()


def claimed(run: Path, pid: int) -> None:
    """A shadow claims its term when it can."""

    def has() -> bool:
        manifests = [read_manifest(run, number) for number in term_numbers(run)]
        return any(manifest is not None and manifest.pid == pid for manifest in manifests)

    wait_until(has, f"the term of {pid}")


@pytest.mark.parametrize(("first", "second"), [(3, 6), (6, 3)])
def test_back_and_back_again(first: int, second: int, runtime: Path, tmp_path: Path) -> None:
    """The shadow of the first claims its term while training goes on behind the second."""
    path, job = tmp_path / "run", Job("adamw")
    run = everystep.attach(
        job.model,
        job.optimizer,
        run=path,
        every=1,
        state=job.state,
        durable_every=1,
        keep=everystep.Keep(last=50),
    )
    trained(run, job, 8)
    run.rewind(first)
    run.rewind(second)
    claimed(path, run.status()["pid"])
    assert counting(path) == [(1, step) for step in range(second, -1, -1)]

    trained(run, job, 9)
    ours = term_numbers(path)[0]
    os.kill(run.status()["pid"], signal.SIGKILL)
    assert run.flush() == 9
    claimed(path, run.status()["pid"])
    behind = [(ours, step) for step in range(9, second, -1)]
    assert counting(path) == behind + [(1, step) for step in range(second, -1, -1)]
    run.close()


_LIFE = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import everystep
from crash.jobs import Job
job = Job("adamw")
options = dict(run={run!r}, state=job.state, every=1, keep=everystep.Keep(last=50), durable_every=1000)
run = everystep.attach(job.model, job.optimizer, **options)
for step in run.steps(100):
    if step == 6:
        deadline = time.monotonic() + 60
        while run.status()["shadow_step"] != 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    job.step()
"""


def test_steps_that_were_gone_back_from_do_not_count_again(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shadow that could not claim hands its state on. It came from a step of a term whose later steps
    were left: those are no part of its line, although its own step has the number of one."""
    path, block, job = tmp_path / "run", tmp_path / "block", Job("adamw")
    options = {"run": path, "state": job.state, "keep": everystep.Keep(last=50)}
    with everystep.attach(job.model, job.optimizer, every=1, durable_every=1, **options) as run:
        trained(run, job, 8)
        run.rewind(4)
    assert counting(path)[0] == (1, 4)

    (tmp_path / "sitecustomize.py").write_text(_REFUSES.format(block=str(block)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    block.touch()
    life = _LIFE.format(tests=str(Path(__file__).parents[1]), run=str(path))
    assert subprocess.run([sys.executable, "-c", life], timeout=120).returncode == -signal.SIGKILL

    job = Job("adamw")
    options["state"] = job.state
    with everystep.attach(job.model, job.optimizer, every=1, durable_every=1000, **options) as run:
        assert run.step == 6
        wait_until(lambda: shadows(runtime) == [run.status()["pid"]], "the shadow before to go")
        block.unlink()
        run.flush()
        found = counting(path)
        assert found[0][1] == 6 and found[1:] == [(1, step) for step in range(4, -1, -1)]
        kept = job.digest()
    other = Job("adamw")
    assert everystep.restore(path, other.model, other.optimizer) == 6 and other.digest() == kept
