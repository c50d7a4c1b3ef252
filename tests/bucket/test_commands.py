"""Commands that are given a bucket's URL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ondisk

from everystep.lane.host import process_start
from everystep.lane.runtime import ShadowCard, remove_card, runtime_dir, write_card
from everystep.store.bucket.tiers import local_dir
from everystep.store.tags import read_tags

from .hosts import Host, objects_in


def command(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "everystep", *words, "--json"], capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_commands_read_from_the_bucket(s3_url: str, tmp_path: Path, local_tiers: Path) -> None:
    url = s3_url
    host = Host(tmp_path / "a", url)
    host.commit(1, 2, 3)
    host.ship()
    code, status = command("status", url)
    assert code == 0 and status["bucket"] == {"url": url, "step": 3}
    assert "disk lost → step 3" in status["summary"] and status["run"] == url
    code, listed = command("ls", url)
    assert code == 0 and [b["step"] for b in listed["bases"]] == [3, 2]
    code, inside = command("inspect", url, "2")
    assert code == 0 and inside["step"] == 2
    assert not local_tiers.exists(), "documents are enough for these"
    code, verified = command("verify", url)
    assert code == 0 and verified["valid_steps"] == [2, 3]
    assert not local_tiers.exists(), "the bucket itself is verified"
    weights = next(
        p for p in objects_in(url).listing() if f"bases/{3:012d}/parts/000000/slots" in p
    )
    data = bytearray(objects_in(url).read(weights) or b"")
    data[-1] ^= 1
    objects_in(url).put(weights, bytes(data))
    code, verified = command("verify", url)
    assert code == 1 and verified["valid_steps"] == [2]
    document = f"terms/000001/bases/{2:012d}/{ondisk.BASE}"
    index = f"terms/000001/bases/{2:012d}/parts/000000/{ondisk.INDEX}"
    for name in (document, index):
        data = objects_in(url).read(name) or b""
        objects_in(url).delete([name])
        code, verified = command("verify", url)
        assert code == 1 and verified["valid_steps"] == [], name
        objects_in(url).put(name, data)
    assert command("verify", url)[1]["valid_steps"] == [2]


def test_a_url_without_a_run(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    for words in (["ls"], ["status"], ["verify"], ["inspect"], ["bisect"]):
        code, refused = command(*words, url)
        assert code == 2 and refused["kind"] == "NotARun", words


def test_tune_takes_a_url(tmp_path: Path, local_tiers: Path) -> None:
    """From the bucket's documents, with the disk that the local tier would lie on."""
    url = f"file://{tmp_path}/bucket"
    code, refused = command("tune", url)
    assert code == 2 and refused["kind"] == "NotARun"
    host = Host(tmp_path / "a", url)
    host.commit(1, 2, 3)
    host.ship()
    code, found = command("tune", url, "--step-time", "0.2s", "--mtbf", "1h")
    assert code == 0 and found["run"] == url and found["plan"]["base_every"] >= 1
    size = next(b["total_bytes"] for b in command("ls", url)[1]["bases"])
    assert found["machine"]["base_bytes"] == size
    assert not local_tiers.exists(), (
        "nothing was fetched, and what was written for measuring is gone"
    )


def test_a_tag_that_no_bucket_would_keep_is_refused(tmp_path: Path, local_tiers: Path) -> None:
    """It was set in a directory of this host alone, and said to be set."""
    url = f"file://{tmp_path}/bucket"
    host = Host(tmp_path / "a", url)
    host.commit(1, 2)
    host.ship()
    for more in ([], ["--remove"]):
        code, refused = command("tag", url, "1", "best", *more)
        assert code == 2 and "nobody ships from this host" in refused["error"], refused
        assert str(local_tiers) in json.dumps(refused)
    assert not local_tiers.exists()
    assert command("tag", str(host.run), "1", "best")[0] == 0
    host.ship()
    assert list(read_tags(Host(tmp_path / "b", url).run)) == ["best"]


def test_a_tag_by_url_on_the_host_that_ships(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    host = Host(local_dir(url), url)
    host.commit(1, 2)
    host.ship()
    place = runtime_dir(str(host.run))
    started = process_start(os.getpid())
    assert started is not None
    write_card(place, ShadowCard(os.getpid(), started, run=str(host.run)))
    try:
        assert command("tag", url, "1", "best")[0] == 0
    finally:
        remove_card(place, os.getpid())
    host.ship()
    assert list(read_tags(Host(tmp_path / "b", url).run)) == ["best"]
