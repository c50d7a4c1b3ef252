"""Who may read and write the files of a run is what the umask says, neither more nor less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import everystep
from everystep.cli.prune import prune_run
from everystep.store.bucket.tiers import sync_from_bucket
from everystep.store.tags import set_tag


@pytest.fixture(params=[0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_whole_run(umask: int, tmp_path: Path) -> None:
    """Bases, a log, a bucket, a tag, a rewind, what prune leaves, and what is fetched elsewhere."""
    run, bucket = tmp_path / "deep" / "run", f"file://{tmp_path}/bucket"
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"durable_log": 1, "durable_every": 2, "bucket": bucket}
    with everystep.attach(model, optimizer, run=run, **options) as training:
        for step in training.steps(6):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            if step == 3:
                training.flush(30)
    set_tag(run, "good", everystep.open_run(run).steps[-1])
    prune_run(run, {"keep_last": 1}, dry_run=False, force=True)
    sync_from_bucket(tmp_path / "elsewhere" / "run", bucket)
    everystep.restore(tmp_path / "elsewhere" / "run", model, optimizer)
    paths = [p for below in ("deep", "elsewhere") for p in (tmp_path / below).rglob("*")]
    kinds = {p.suffix for p in paths}
    assert {".json", ".safetensors", ".bin", ".log"} <= kinds, kinds
    wrong = {
        str(p): oct(p.stat().st_mode & 0o777)
        for p in paths
        if p.stat().st_mode & 0o777 != (0o777 if p.is_dir() else 0o666) & ~umask
    }
    assert not wrong
