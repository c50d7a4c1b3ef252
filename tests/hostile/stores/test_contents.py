"""Documents inside of documents, changed under right checksums: what loading would refuse is found by verify,
passed over by whoever resumes, and told. A generator is never given a state that it does not check itself."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from states import random_states
from store.small_store import build, census
from typer.testing import CliRunner

import everystep
from everystep.cli.app import app
from everystep.core.events import Call, Edit, Planes, Seal, SlotValues, Sparse
from everystep.errors import CorruptData, NothingToRecover, StepUnavailable
from everystep.format.base import Point
from everystep.format.entry import frame_entry
from everystep.format.log import LoggedRecord, census_digest
from everystep.format.slot import pack_events
from everystep.format.values import encode
from everystep.recover.find import find_newest
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.tiers import sync_from_bucket
from everystep.store.disk.meter import Throttle
from everystep.store.log import LogWriter

from .documents import Document, Inner, Store
from .jobs import JOBS, train

NEWEST = 3
GARBAGE = b"\xc1"


def changed(change: Callable[[list[Any]], object]) -> bytes:
    """Random states that were changed in one place."""
    tree = msgspec.msgpack.decode(random_states(7))
    change(tree)
    return msgspec.msgpack.encode(tree)


def in_the_midst(tree: list[Any]) -> None:
    """torch's own check takes it, and draws what lies behind the words."""
    state = bytearray(tree[2])
    struct.pack_into("<iiQ", state, 8, 624, 1, 600)
    tree[2] = bytes(state)


RANDOM_STATES: dict[str, Callable[[list[Any]], object]] = {
    "numpy, behind its words": lambda t: t.__setitem__(1, ["MT19937", bytes(2496), 1000, 0, 0.0]),
    "numpy, far behind": lambda t: t.__setitem__(1, ["MT19937", bytes(2496), 10**7, 0, 0.0]),
    "numpy, too far for an int": lambda t: t.__setitem__(
        1, ["MT19937", bytes(2496), 2**40, 0, 0.0]
    ),
    "numpy, too few words": lambda t: t.__setitem__(1, ["MT19937", bytes(2492), 0, 0, 0.0]),
    "numpy, two normals": lambda t: t.__setitem__(1, ["MT19937", bytes(2496), 0, 2, 0.0]),
    "python, at word 625": lambda t: t[0].__setitem__(1, bytes(4992) + struct.pack("<Q", 625)),
    "torch, to read 600 more": in_the_midst,
    "a CUDA device": lambda t: t.__setitem__(3, [bytes(15)]),
    "garbage": lambda t: t.clear(),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    build(tmp_path / "run", 200)
    return tmp_path / "run"


def session_of(store: Store, step: int = NEWEST) -> Document:
    return next(d for d in store.of("session") if d.tree["step"] == step)


def change_session(root: Path, **fields: Any) -> None:
    store = Store(root)
    session = session_of(store)
    session.tree.update(fields)
    store.seal(session)


def verified(run: Path | str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["verify", str(run), "--json"])
    return {"code": done.exit_code, **json.loads(done.stdout)}


def falls_back(run: Path) -> None:
    """The newest base is refused, by loading and by verify, in the same words; an older one serves."""
    told = verified(run)
    assert (told["code"], told["valid_steps"], len(told["problems"])) == (1, [1, 2], 1)
    found, _ = find_newest(run, None)
    assert found is not None and found.point.step == NEWEST - 1
    assert found.problems == told["problems"]
    assert find_newest(run, None, NEWEST) == (None, None), "and it is not gone back to"


# ---------------------------------------------------------------------- bases


@pytest.mark.parametrize("name", RANDOM_STATES)
def test_random_states_that_no_generator_has(name: str, run: Path) -> None:
    change_session(run, rng=changed(RANDOM_STATES[name]))
    falls_back(run)


SESSIONS: dict[str, dict[str, Any]] = {
    "random states": {"rng": b""},
    "user state": {"state": GARBAGE},
    "user state that is no dict": {"state": encode([1], "")},
    "user state under a number": {"state": encode({1: 2}, "")},
    "groups": {"groups": [GARBAGE]},
    "groups that are too many": {"groups": [encode([{}, {}], "")]},
    "slots": {"values": [[0, 0, GARBAGE]]},
}


@pytest.mark.parametrize("name", SESSIONS)
def test_session_values_that_loading_refuses(name: str, run: Path) -> None:
    change_session(run, **SESSIONS[name])
    falls_back(run)


def test_a_tail_that_loading_refuses(run: Path) -> None:
    store = Store(run)
    tail = next(d for d in store.of("tail"))
    tail.tree[0][0].append(msgspec.to_builtins(SlotValues(0, 0, GARBAGE)))
    store.seal(tail)
    falls_back(run)


def test_a_bucket_with_such_a_base(run: Path, tmp_path: Path) -> None:
    """What is brought from there is passed over, and what is there is refused."""
    url = f"file://{tmp_path / 'bucket'}"
    BaseShipper(Bucket(url), run, 2, Throttle(0)).turn()
    change_session(tmp_path / "bucket", rng=GARBAGE)
    assert verified(url)["valid_steps"] == [1, 2]
    sync_from_bucket(tmp_path / "fetched", url)
    falls_back(tmp_path / "fetched")


def test_nothing_is_left(run: Path) -> None:
    store = Store(run)
    for session in store.of("session"):
        session.tree["rng"] = GARBAGE
        store.seal(session)
    with pytest.raises(NothingToRecover, match="random states"):
        find_newest(run, None)


# ---------------------------------------------------------------------- logs


def logged(step: int, *events: Any, payload: bytes = b"", **fields: Any) -> LoggedRecord:
    """A record that holds these events, and a seal with these fields."""
    plain = {"rng": random_states(), "state": b"", "groups": (b"",), "time_ns": 0}
    seal = Seal(step, step - 1, **{**plain, **fields})
    body = frame_entry(*pack_events([*events, seal]), payload)
    return LoggedRecord(step, step - 1, memoryview(body))


GROUPS = encode([{"lr": 0.1}], "")
RECORDS: dict[str, Callable[[], LoggedRecord]] = {
    **{
        f"random states: {name}": lambda change=change: logged(5, rng=changed(change))
        for name, change in RANDOM_STATES.items()
    },
    "user state": lambda: logged(5, state=GARBAGE),
    "groups": lambda: logged(5, groups=(GARBAGE,)),
    "groups that are too many": lambda: logged(5, groups=(encode([{}, {}], ""),)),
    "groups of a call": lambda: logged(5, Call(0, GARBAGE, b"\0", 0, {}), payload=bytes(1024)),
    "slots": lambda: logged(5, SlotValues(0, 0, GARBAGE)),
    "words that are not zero": lambda: logged(
        5,
        Sparse(300, 1, 1),
        Edit(1, "", "uint8", (300,), 0, 300, 0),
        payload=struct.pack("<IIi", 1, 75, 9),
    ),
    "byte planes": lambda: logged(
        5,
        Planes(300, 4, (16,)),
        Edit(1, "", "uint8", (300,), 0, 300, 0),
        payload=bytes(16),
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_loading_refuses_ends_the_log(name: str, run: Path) -> None:
    """As other damage does: what lies before it counts, and it is told."""
    run_id = Store(run).of("run")[0].tree["run_id"]
    log = LogWriter(run, run_id, 2, census_digest(census(200)))
    log.append([logged(4), RECORDS[name](), logged(6)])
    log.close()
    told = verified(run)
    assert told["log_step"] == 4 and len(told["notes"]) == 1, told
    found, _ = find_newest(run, None)
    assert found is not None and found.point == Point(2, 4)
    assert found.problems == told["notes"]
    with pytest.raises(StepUnavailable, match="damaged"):
        find_newest(run, None, 5)
    found, _ = find_newest(run, None, 4)
    assert found is not None and found.point == Point(2, 4)
    with pytest.raises(CorruptData):  # who reads it only when its turn comes meets it then
        _read_on_the_way(run)


def _read_on_the_way(run: Path) -> None:
    from everystep.format.entry import check_body

    found, _ = find_newest(run, None, verify_lazily=True)
    assert found is not None and found.point.step == 6
    for record in found.log:
        check_body(record, found.census, "log")


# ---------------------------------------------------------------------- a training that goes on


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("EVERYSTEP_RUNTIME_DIR", str(folder / "rt"))
        train("plain", folder / "run")
    yield folder / "run"


def attach(run: Path) -> Any:
    job = JOBS["plain"]()
    options = {**job.options, "on_failure": "raise"}
    return everystep.attach(job.model, job.optimizer, run=run, state=job.state, **options)


def test_attach_goes_on_from_an_older_base_and_says_why(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    store = Store(run)
    for document in store.of("log"):
        document.path.unlink()
    newest = max(store.of("session"), key=lambda document: document.tree["step"])
    newest.tree["rng"].tree[1] = ["MT19937", bytes(2496), 10**7, 0, 0.0]
    store.seal(newest)
    with pytest.warns(UserWarning, match="random states"), attach(run) as live:
        assert live.step < newest.tree["step"]


def test_attach_ends_the_log_before_such_a_record_and_says_why(
    trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    store = Store(run)
    manifest = max(store.of("manifest"), key=lambda document: document.path)
    base = manifest.tree["bases"].pop()[
        "step"
    ]  # so that the log leads from the one before it to the end
    store.seal(manifest)
    records = [(log, record) for log in store.of("log") for record in log.tree["records"]]
    log, record = max(records, key=lambda pair: pair[1][0])
    seal = record[2][-1][0][-1]
    seal[5] = [Inner([{"dict": [["params", 1]]}])]
    store.seal(log)
    with pytest.warns(UserWarning, match="param group"), attach(run) as live:
        assert live.step == record[0] - 1 <= base
