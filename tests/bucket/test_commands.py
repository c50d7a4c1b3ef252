"""Commands that are given a bucket's URL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ondisk

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
    weights = next(p for p in objects_in(url).listing() if f"bases/{3:012d}/slots" in p)
    data = bytearray(objects_in(url).read(weights) or b"")
    data[-1] ^= 1
    objects_in(url).put(weights, bytes(data))
    code, verified = command("verify", url)
    assert code == 1 and verified["valid_steps"] == [2]
    objects_in(url).delete([f"epochs/000001/bases/{2:012d}/{ondisk.INDEX}"])
    code, verified = command("verify", url)
    assert code == 1 and verified["valid_steps"] == []


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
