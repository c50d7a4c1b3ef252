"""A trainer that is PID 1 of its namespace dies with everything in it, the shadow included.

Then only the store survives, and status must have said so before: what it claimed is still there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import everystep

from .jobs import Job, read_journal

UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
TRAINER = """
import json, os, sys
from pathlib import Path
import everystep
from crash.jobs import Job, Journal

job, out = Job("adam"), Journal(Path(sys.argv[2]))
options = {"run": sys.argv[1], "state": job.state, "every": 1, "durable_every": 4, "on_lag": "wait"}
with everystep.attach(job.model, job.optimizer, **options) as run:
    out.write("resumed", step=run.step, pid=os.getpid())
    for step in run.steps(10**6):
        job.step()
        out.write("step", step=step + 1, digest=job.digest())
        if step % 5 == 0:
            status = run.status()
            out.write("claim", **{k: status[k] for k in ("summary", "durable_step",
                      "outlives_trainer", "outlives_why", "shadow_step")})
"""


def may_unshare() -> str:
    """Empty if a namespace can be made here, else why not."""
    try:
        done = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return "there is no unshare"
    return "" if done.returncode == 0 else done.stderr.strip() or "refused"


def live_in_a_namespace(run: Path, journal: Path, until_step: int) -> None:
    """One life of a trainer as PID 1, ended by a SIGKILL of PID 1 itself."""
    words = [*UNSHARE, sys.executable, "-c", TRAINER, str(run), str(journal)]
    here = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(words, cwd=here, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(
            lambda: (
                process.poll() is not None
                or any(
                    e["kind"] == "claim" and (e["durable_step"] or 0) > until_step
                    for e in read_journal(journal)
                )
            ),
            f"a durable step beyond {until_step}",
            90,
        )
        assert process.poll() is None, f"the trainer ended: {process.communicate()[1][-2000:]}"
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGKILL)
    finally:
        process.kill()  # with --kill-child everything below goes too
        process.wait(30)


def claims(journal: Path) -> list[dict[str, Any]]:
    return [e for e in read_journal(journal) if e["kind"] == "claim"]


def test_nothing_claimed_is_lost_with_the_namespace(tmp_path: Path) -> None:
    refused = may_unshare()
    if refused:
        pytest.skip(f"unshare --pid is not permitted: {refused}")
    run, journal = tmp_path / "run", tmp_path / "journal"
    claimed = 0
    for _ in range(2):
        live_in_a_namespace(run, journal, claimed)
        last = claims(journal)[-1]
        print(json.dumps(last))
        assert last["outlives_trainer"] is False and "PID 1" in last["outlives_why"]
        promised = [int(step) for step in re.findall(r"step (\d+)", last["summary"])]
        assert promised == [last["durable_step"]] * 2, last["summary"]  # process dies, host dies
        claimed = max(claim["durable_step"] or 0 for claim in claims(journal))
        job = Job("adam")
        step = everystep.restore(run, job.model, job.optimizer)
        assert step >= claimed, f"status claimed step {claimed}, the store holds {step}"
        digests = {e["step"]: e["digest"] for e in read_journal(journal) if e["kind"] == "step"}
        assert job.digest() == digests[step]
    resumed = [e for e in read_journal(journal) if e["kind"] == "resumed"]
    assert [e["pid"] for e in resumed] == [1, 1] and resumed[1]["step"] > 0
