"""The stores that were written once still say what they said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import everystep
from everystep.format.base import Point
from everystep.store.bases import read_base
from everystep.store.log_reader import LogReader
from everystep.store.runs import read_lineage
from everystep.store.tags import read_tags
from everystep.store.verify import verify_run

from .jobs import JOBS, TAG, Known
from .make import KNOWN, STORES

KNOWN_DIGESTS: Known = json.loads(KNOWN.read_text())
_BYTES_MAX = 200_000


@pytest.fixture(params=JOBS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORES / request.param, tmp_path / request.param))


def test_they_are_whole(run: Path) -> None:
    report = verify_run(run)
    assert not report.problems and not report.notes
    assert report.valid == sorted(JOBS[run.name]().based, reverse=True)


def test_every_step_comes_back(run: Path) -> None:
    for step, digests in KNOWN_DIGESTS[run.name].items():
        job = JOBS[run.name]()
        assert everystep.restore(run, job.model, job.optimizer, step=int(step)) == int(step)
        assert job.digests() == digests, f"step {step}"


def test_user_state_comes_back(run: Path) -> None:
    assert everystep.open_run(run).state() == {"notes": {"made": "golden"}}


def test_they_hold_what_they_are_for(tmp_path: Path) -> None:
    """A sparse log, a base that refers to an earlier one, a tag."""
    known = {name: everystep.open_run(STORES / name) for name in JOBS}
    assert {name: [*run.tags] for name, run in known.items()} == {name: [TAG] for name in JOBS}
    later, earlier = read_lineage(STORES / "references").candidates
    assert earlier.point == Point(1, 1) == read_tags(STORES / "references")[TAG].point
    files = read_base(STORES / "references", later).files
    assert {file.step for file in files} == {0, 3}, "the base of step 0 itself has gone"
    sizes = {name: _record_bytes(STORES / name) for name in ("dense", "compressed")}
    assert sizes["compressed"] < sizes["dense"] + 64 * 32, "its gradients take 8192 bytes"


def _record_bytes(run: Path) -> int:
    lineage = read_lineage(run)
    base = read_base(run, lineage.candidates[-1])
    return sum(len(r.body) for r in LogReader(run, lineage, base.point, base.census))


def test_they_are_small() -> None:
    sizes = [path.stat().st_size for path in STORES.rglob("*") if path.is_file()]
    assert sum(sizes) <= _BYTES_MAX
