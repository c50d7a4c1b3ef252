"""Verifying a run whose writer goes on meanwhile, and what loading would refuse."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hostile.stores.documents import Store
from typer.testing import CliRunner

from everystep.cli.app import app
from everystep.core.retention import Rules
from everystep.format.base import StoredFile
from everystep.format.values import encode
from everystep.store.bases import check_file
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run

from .small_store import build
from .test_retention import snapshot


def beside(run: Path, work: Callable[[], None], times: int) -> Callable[[StoredFile], None]:
    """Checks files, and lets the writer go on before each of the first few."""
    left, lock = [times], threading.Lock()

    def check(file: StoredFile) -> None:
        with lock:  # files are looked at by several threads
            if left[0]:
                left[0] -= 1
                work()
        check_file(run, file)

    return check


@pytest.mark.parametrize("times", [1, 3])
def test_what_a_writer_has_dropped_meanwhile_is_no_damage(times: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(1))
    writer.commit(snapshot(2))
    steps = iter(range(3, 20))

    def go_on() -> None:
        step = next(steps)
        writer.commit(snapshot(step, thawed=step))
        writer.apply_retention()

    report = verify_run(run, check=beside(run, go_on, times))
    assert report.problems == [] and report.valid == [2 + times]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_writer_that_is_faster_than_who_reads_makes_no_damage(keep: int, tmp_path: Path) -> None:
    """All that was looked at has gone each time before it was read."""
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(keep))
    writer.commit(snapshot(2))
    steps = iter(range(3, 2000))

    def go_on() -> None:
        for step in (next(steps) for _ in range(keep)):
            writer.commit(snapshot(step, thawed=step))
            writer.apply_retention()

    report = verify_run(run, check=beside(run, go_on, 1000))
    assert report.problems == [] and report.valid == []
    assert "verify it again while its writer rests" in report.notes[0]
    assert verify_run(run).notes == []


def test_damage_beside_a_writer_is_damage(tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = TermWriter(run, None, Rules(3))
    writer.commit(snapshot(2))

    def damage() -> None:
        writer.commit(snapshot(3, thawed=3))
        path = next((run / "terms/000001/bases/000000000002").rglob("weights*"))
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")

    report = verify_run(run, check=beside(run, damage, 1))
    assert len(report.problems) == 1 and "chunk checksum" in report.problems[0]
    assert report.valid == [3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", encode({"a": 1}, "").replace(b"dict", b"load")),
        ("state", msgspec.msgpack.encode({"dict": [["t", {"dtype": "load"}]]})),
        ("state", msgspec.msgpack.encode({"tensor": ["float32", [4], b"", "cpu"]})),
        ("state", msgspec.msgpack.encode({"device": "cuda:0; rm"})),
        ("groups", [msgspec.msgpack.encode([{"dict": [["params", 1]]}])]),
        ("step", 7),
    ],
)
def test_what_loading_would_refuse_is_found(field: str, value: object, tmp_path: Path) -> None:
    """Its checksums are right: somebody else wrote it."""
    run = tmp_path / "run"
    build(run, 200)
    store = Store(run)
    session = max(store.of("session"), key=lambda document: document.path)
    session.tree[field] = value
    store.seal(session)
    told = CliRunner().invoke(app, ["verify", str(run), "--json"])
    document = msgspec.json.decode(told.stdout)
    assert told.exit_code == 1 and document["valid_steps"] == [1, 2], document
    assert len(document["problems"]) == 1


def test_a_log_with_a_hole_is_not_well(tmp_path: Path) -> None:
    """What it says beside the hole is not that all is well."""
    run = tmp_path / "run"
    shutil.copytree(_logged(tmp_path / "made"), run)
    (segment,) = run.rglob("*.log")
    data = bytearray(segment.read_bytes())
    data[4096 + 60] ^= 1  # in the body of its first record
    segment.write_bytes(data)
    told = CliRunner().invoke(app, ["verify", str(run)])
    assert told.exit_code == 0
    assert "the log:" in told.stdout and "all is well" not in told.stdout
    assert "every base is whole, the log is not" in told.stdout


def _logged(run: Path) -> Path:
    from .test_zombies import log_of, record

    writer = TermWriter(run, None, Rules(3))
    writer.commit(snapshot(2))
    log = log_of(run, writer)
    log.append([record(3), record(4)])
    log.close()
    return run
