"""Trains, and keeps what a living run has in its directory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec
import torch

import everystep
from everystep.store.disk.files import TEMPORARY_PREFIX, remove_file
from everystep.store.layout import BASE, term_numbers
from everystep.store.log import old_segments
from everystep.store.runs import read_lineage, read_manifest, write_manifest
from golden.jobs import JOBS, TAG, Job, Known

STORES = Path(__file__).parent / "stores"
KNOWN = STORES / "known.json"
_SECONDS = 30.0


def main() -> int:
    torch.set_num_threads(1)
    shutil.rmtree(STORES, ignore_errors=True)
    STORES.mkdir()
    known: Known = {}
    with tempfile.TemporaryDirectory(prefix="eg-") as home:
        os.environ["EVERYSTEP_RUNTIME_DIR"] = home
        for name, make in JOBS.items():
            torch.manual_seed(0)
            known[name] = _train(make(), Path(home) / name, STORES / name)
    KNOWN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return 0


def _train(job: Job, run_dir: Path, kept: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    options = {
        "durable_every": "1h",
        "keep": everystep.Keep(last=len(job.based)),
        "on_failure": "raise",
    }
    options |= {"durable_log": 1} if job.logged else {}
    with everystep.attach(
        job.model, job.optimizer, run=run_dir, state={"notes": {"made": "golden"}}, **options
    ) as run:
        for step in run.steps(job.total):
            _keep(job, run, step, found)
            job.turn(step)
        _keep(job, run, job.total, found)
        deadline = time.monotonic() + _SECONDS
        while not _settled(run, run_dir, job):
            assert time.monotonic() < deadline, run.status()
            time.sleep(0.1)
        shutil.copytree(run_dir, kept)  # closing would leave another base
    for path in old_segments(kept, read_lineage(kept), job.based[0]):
        remove_file(path)  # the next base would have them removed
    for term in term_numbers(kept):
        manifest = read_manifest(kept, term)
        assert manifest is not None
        write_manifest(kept, msgspec.structs.replace(manifest, host="golden", pid=1))
    return found


def _keep(job: Job, run: everystep.Run, step: int, found: dict[str, dict[str, str]]) -> None:
    """A step as the next turn finds it."""
    if step in (0, *job.based):
        run.flush()  # the base of step 0 goes again
    if step == job.based[0]:
        run.tag(TAG)
    if step in job.based or (job.logged and step):
        found[str(step)] = job.digests()


def _settled(run: everystep.Run, run_dir: Path, job: Job) -> bool:
    """Everything is durable, and what is not kept has gone."""
    bases = tuple(sorted(int(path.parent.name) for path in run_dir.rglob(BASE)))
    leftovers = any(run_dir.rglob(f"{TEMPORARY_PREFIX}*"))
    durable = run.status()["durable_step"]
    return durable >= job.total and bases == job.based and not leftovers
