"""A writer killed at every named point of a commit, zombies of older terms, racing claims.

Whatever happens, the newest base that counts loads bit for bit, nothing acknowledged is lost, and the
next term goes on.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import ondisk
import pytest
from states import numbers_in

from everystep.core.retention import Rules
from everystep.errors import Fenced, StoreError
from everystep.format.log import census_digest
from everystep.recover.find import find_newest
from everystep.store import runs
from everystep.store import term as term_module
from everystep.store.disk import once
from everystep.store.disk.commit import CRASH_POINTS, LOG_CRASH_POINTS
from everystep.store.disk.files import RunPath
from everystep.store.log_reader import read_log
from everystep.store.runs import Lineage, Point, create_run, read_lineage, read_run
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run

from .writer import CENSUS, SIZES, content, continue_run, snapshot, version_of

TESTS = Path(__file__).parents[1]


def write(run: Path, keep: int, first: int, last: int, point: str) -> tuple[int, int]:
    """Run the writer; returns how it ended and the last step it was told is durable."""
    words = [sys.executable, "-m", "crash.writer", str(run), *map(str, (keep, first, last)), point]
    done = subprocess.run(words, cwd=TESTS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, max((int(line) for line in done.stdout.split()), default=0)


def load(run: Path) -> int:
    """The newest step that loads; every byte of it is compared."""
    found, _ = find_newest(run, None)
    assert found is not None, "nothing can be loaded"
    step = found.point.step
    seen = set()
    for t in found.tensors():
        size = SIZES[t.atom]
        assert bytes(t.data) == content(t.atom, t.slot, version_of(t.atom, step), size), t.key
        seen.add((t.atom, t.slot))
    assert len(seen) == 3 * len(SIZES) and found.census == CENSUS
    assert numbers_in(found.session.rng) == [step] and found.session.step == step
    return step


def check_goes_on(run: Path, keep: int, step: int) -> None:
    """The next term writes on top of whatever the dead one left, and everything verifies."""
    code, durable = write(run, keep, step + 1, step + 3, "none")
    assert code == 0 and durable == step + 3 == load(run)
    report = verify_run(run)
    assert report.problems == [] and len(report.valid) == min(keep, step + 3)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_killed_in_commit(point: str, keep: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, acknowledged = write(run, keep, 1, 4, point)
    assert code == -signal.SIGKILL, f"{point} was never reached"
    newest = load(run)
    assert 3 <= acknowledged <= newest <= 4, f"{acknowledged} was acknowledged, {newest} loads"
    assert verify_run(run).problems == []
    check_goes_on(run, keep, newest)


@pytest.mark.parametrize("point", [p for p in CRASH_POINTS if p.startswith("manifest")])
def test_killed_while_claiming(point: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _ = write(run, 2, 1, 1, f"claim:{point}")  # the very first claim, the run not made yet
    assert code == -signal.SIGKILL, f"{point} was never reached"
    assert find_newest(run, None)[0] is None
    assert write(run, 2, 1, 2, "none") == (0, 2)
    assert write(run, 2, 3, 3, f"claim:{point}")[0] == -signal.SIGKILL
    assert load(run) == 2
    check_goes_on(run, 2, 2)


def test_killed_at_first_base(tmp_path: Path) -> None:
    for point in CRASH_POINTS[:-1]:
        run = tmp_path / point
        assert write(run, 2, 1, 1, point)[0] == -signal.SIGKILL, f"{point} was never reached"
        committed = bool(read_lineage(run).candidates)
        assert committed == (point == "manifest_renamed")
        assert verify_run(run).problems == []
        check_goes_on(run, 2, load(run) if committed else 0)


LOGGER = """
import os, sys
from pathlib import Path
from everystep.store import layout
from everystep.format.log import LoggedRecord
from everystep.store.log import LogWriter
run = Path(sys.argv[1])
os.makedirs(layout.term_dir(run, 1))
writer = LogWriter(run, "ab" * 16, 1, int(sys.argv[3]))
for step in (1, 3, 5):
    if step == 5:
        os.environ["EVERYSTEP_CRASH_AT"] = sys.argv[2]
    writer.append([LoggedRecord(s, s - 1, memoryview(bytes([s]) * 5000)) for s in (step, step + 1)])
    print(step + 1, flush=True)
"""


@pytest.mark.parametrize("point", LOG_CRASH_POINTS)
@pytest.mark.usefixtures("plain_bodies")
def test_killed_while_the_log_is_written(point: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOGGER, str(tmp_path), point, str(census_digest(CENSUS))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["2", "4"], "acknowledged"
    log = read_log(tmp_path, Lineage("ab" * 16, [], [], ((1, None),)), Point(1, 0), CENSUS)
    assert log.end.step == (4 if point == "log_filled" else 6)  # written, though nobody was told
    assert [bytes(r.body[:1]) for r in log] == [bytes([r.step]) for r in log]


def test_zombie_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    zombie = TermWriter(run, None, Rules(2))
    zombie.commit(snapshot(1))
    owner = continue_run(run, 2)
    with pytest.raises(Fenced, match="term 2 owns the run"):
        zombie.commit(snapshot(5))
    assert load(run) == 1
    owner.commit(snapshot(2))
    monkeypatch.setattr(term_module, "check_fence", lambda *_: None)
    zombie.commit(snapshot(9))  # as if it had passed the check just before the new claim
    assert load(run) == 2
    assert all(c.point != Point(1, 9) for c in read_lineage(run).candidates)
    owner.commit(snapshot(3))
    assert load(run) == 3 and verify_run(run).problems == []
    assert Point(1, 9) not in [c.point for c in read_lineage(run).candidates]


def test_zombie_stays_out_when_a_manifest_is_lost(tmp_path: Path) -> None:
    """Terms 1 <- 2 <- 3, and 1 went on as a zombie: losing 2's manifest must not let it in."""
    run = tmp_path / "run"
    first = TermWriter(run, None, Rules(5))
    first.commit(snapshot(1))
    first.commit(snapshot(8))
    second = TermWriter(
        run, Point(1, Rules(1)), 5
    )  # rewound to step 1: the base at 8 no longer counts
    second.commit(snapshot(10))
    TermWriter(run, Point(2, 10), Rules(5))
    (run / "terms/000002/manifest.json").write_bytes(b"torn")
    assert Point(1, 8) not in [c.point for c in read_lineage(run).candidates]


@pytest.mark.parametrize("name", [ondisk.BASE, f"parts/000000/{ondisk.INDEX}"])
def test_a_damaged_older_base_does_not_stop_the_writer(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = continue_run(run, 2)
    for step in (1, 2):
        writer.commit(snapshot(step))
        writer.apply_retention()
    document = run / "terms/000001/bases/000000000002" / name
    document.write_bytes(document.read_bytes()[:-1])
    for step in (3, 4, 5):
        assert writer.commit(snapshot(step)).step == step
        writer.apply_retention()
        assert load(run) == step
    assert verify_run(run).problems == []


REFUSE_LINKS = """
import errno, os
def refuse(*_, **__):
    raise OSError({0}, os.strerror({0}))
os.link = refuse
"""


@pytest.mark.parametrize("refusal", [0, errno.EPERM, errno.EOPNOTSUPP])
def test_racing_claims_get_different_numbers(refusal: int, tmp_path: Path) -> None:
    """Also where hard links are refused."""
    run = tmp_path / "run"
    code = (REFUSE_LINKS.format(refusal) if refusal else "") + (
        "import sys, time; from pathlib import Path; from everystep.store.runs import claim_term\n"
        "run, go = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "while not go.exists(): time.sleep(0.001)\n"
        "for _ in range(10):\n"
        "    manifest = claim_term(run, None)\n"
        "    print(manifest.term, manifest.run_id)\n"
    )
    go = tmp_path / "go"
    words = [sys.executable, "-c", code, str(run), str(go)]
    racers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    go.touch()
    lines = [line for racer in racers for line in racer.communicate(timeout=60)[0].splitlines()]
    assert all(racer.returncode == 0 for racer in racers)
    numbers = [line.split()[0] for line in lines]
    assert len(numbers) == len(set(numbers)) == 40
    assert len({line.split()[1] for line in lines}) == 1, "two runs were made of one directory"


def test_a_creator_that_died_where_links_are_refused_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(once, "_LOCKED_SECONDS_MAX", 0.1)
    lock = tmp_path / f"{ondisk.TEMPORARY_PREFIX}{ondisk.RUN_DOCUMENT}-lock"
    lock.touch()
    with pytest.raises(StoreError, match=f"remove {lock}"):
        create_run(tmp_path)
    assert "Operation not permitted" in caplog.text
    lock.unlink()
    assert create_run(tmp_path) == create_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [ondisk.RUN_DOCUMENT]


def test_a_run_that_is_created_just_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its document appears while somebody looks for it: no run yet, but not somebody else's folder either."""
    plain = runs.read_file

    def and_then_it_appears(path: RunPath) -> bytes:
        try:
            return plain(path)
        except FileNotFoundError:
            monkeypatch.setattr(runs, "read_file", plain)
            create_run(tmp_path)
            raise

    monkeypatch.setattr(runs, "read_file", and_then_it_appears)
    assert read_run(tmp_path) is None
    assert read_run(tmp_path) is not None
