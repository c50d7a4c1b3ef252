"""Uploads and fetches killed with SIGKILL at random instants. The bucket never names what it does not hold;
what was acknowledged comes back on another host. EVERYSTEP_BUCKET_KILLS asks for more."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import ondisk

from everystep.store.verify import verify_run

from .hosts import Host, load, missing_in_bucket

KILLS = int(os.environ.get("EVERYSTEP_BUCKET_KILLS", "5"))
SEED = int(os.environ.get("EVERYSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
FETCH = "import sys; from pathlib import Path; from everystep.store.bucket.tiers import sync_from_bucket\n"
FETCH += "print('begun', flush=True); sync_from_bucket(Path(sys.argv[1]), sys.argv[2])"


class Watcher(threading.Thread):
    """Lists the bucket all the time and compares it with what its newest commit names."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(daemon=True)
        self._url, self._folder = url, folder
        self.stopping = threading.Event()
        self.looks, self.lost = 0, []

    def run(self) -> None:
        while not self.stopping.is_set():
            shutil.rmtree(self._folder, ignore_errors=True)
            lost = missing_in_bucket(self._url, self._folder)
            self.looks += lost is not None
            self.lost += lost or []


def killed(words: list[str], ready: str, seconds: float) -> list[str]:
    """Start it, kill it some time after it said that it is ready; what it had said until then."""
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == ready
    time.sleep(seconds)
    process.kill()
    return process.communicate(timeout=30)[0].split()


def test_uploads_killed_at_random_instants(s3_url: str, tmp_path: Path) -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    draw = random.Random(SEED)
    watcher = Watcher(s3_url, tmp_path / "documents")
    watcher.start()
    step = 0
    for i in range(KILLS):
        run = tmp_path / f"host{i // 2}"  # every second time the host is a new one
        words = ["-m", "bucket.hosts", str(run), s3_url, str(step + 1), str(step + 1000), "2"]
        said = killed(words, "claimed", draw.uniform(0.0, 0.8))
        acknowledged = int(said[-1]) if said else step
        shutil.rmtree(tmp_path / "reader", ignore_errors=True)
        if acknowledged or step:
            Host(tmp_path / "reader", s3_url)  # claims nothing in the bucket unless it ships
            newest = load(tmp_path / "reader")
            assert newest >= acknowledged, f"{acknowledged} was acknowledged, {newest} comes back"
            assert verify_run(tmp_path / "reader").problems == []
            step = newest if i % 2 else max(newest, load(run))
    watcher.stopping.set()
    watcher.join(30)
    assert watcher.looks > KILLS and watcher.lost == []


def test_fetches_killed_at_random_instants(s3_url: str, tmp_path: Path) -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    draw = random.Random(SEED)
    host = Host(tmp_path / "a", s3_url)
    host.commit(1, 2, 3)
    host.ship()
    run = tmp_path / "b"
    for _ in range(KILLS):
        killed(["-c", FETCH, str(run), s3_url], "begun", draw.uniform(0.0, 0.3))
        if (run / "everystep.json").exists() and (run / "terms/000001/manifest.json").exists():
            assert load(run) == 3, "it counts, so it is whole"
            shutil.rmtree(run)
    assert load(Host(run, s3_url).run) == 3
    assert not [p for p in run.rglob(f"{ondisk.TEMPORARY_PREFIX}*") if "safetensors" in p.name]
