"""Stores that say absurd things: numbers that no run reaches, bytes that are no text, files that are nearly
all holes. Every refusal is one of ours, and none of them takes long or much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import ondisk
import pytest
import xxhash
from store.small_store import build, census, snapshot
from typer.testing import CliRunner

from everystep.cli.app import app
from everystep.core.events import Call, Presence, Seal
from everystep.core.numbers import STEP_MAX, TERM_MAX
from everystep.core.retention import Rules
from everystep.errors import CorruptData, StoreError
from everystep.format import log
from everystep.format.base import CHUNK_BYTES, Point
from everystep.format.checks import check_entry
from everystep.format.document import VERSION
from everystep.format.values import decode, encode
from everystep.recover.find import find_newest
from everystep.store import layout, runs
from everystep.store.bases import read_base
from everystep.store.disk.files import RunPath
from everystep.store.runs import claim_term, read_lineage, read_manifest
from everystep.store.term import TermWriter

from .documents import Inner, Store

NEWEST = 3
READERS: tuple[tuple[str, ...], ...] = (("ls",), ("inspect",), ("verify",), ("bisect",))
READERS += (("status",), ("tune",), ("prune", "--dry-run"), ("diff", "1", "2"))
M61 = (1 << 61) - 1


@pytest.fixture
def run(tmp_path: Path) -> Path:
    build(tmp_path / "run", 200)
    return tmp_path / "run"


def says(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.output


def all_speak(run: Path) -> None:
    for words in READERS:
        says(words[0], run, *words[1:])


def newest_found(run: Path) -> int:
    found, _ = find_newest(run, None)
    assert found is not None
    return found.point.step


def manifest_of(run: Path, term: int) -> Path:
    return ondisk.term_dir(run, term) / ondisk.MANIFEST


def sealed(kind: str, body: bytes, version: str = str(VERSION)) -> bytes:
    head = f"{kind} {version} {len(body)}"
    digest = xxhash.xxh3_128_hexdigest(head.encode() + b"\n" + body)
    return f"everystep {head} {digest}\n".encode() + body


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("number", [TERM_MAX + 1, 10**17, 10**18 - 1])
def test_numbers_that_no_run_reaches_are_not_ours(number: int, run: Path) -> None:
    """The next term was one that nobody listed: its bases were lost, and the one after it was looked for
    without end."""
    (run / "terms" / str(number)).mkdir()
    for expected in (3, 4):
        writer = TermWriter(run, Point(2, NEWEST), Rules(5))
        assert writer.manifest.term == expected
    writer.commit(snapshot(NEWEST, 200))
    found, _ = find_newest(run, None)
    assert found is not None and found.point == Point(4, NEWEST)


def test_behind_the_last_number_there_is_none(run: Path) -> None:
    (run / "terms" / str(TERM_MAX)).mkdir()
    with pytest.raises(StoreError, match=str(TERM_MAX)) as refusal:
        claim_term(run, Point(2, NEWEST))
    assert refusal.value.hint
    assert newest_found(run) == NEWEST


def test_a_number_that_stays_taken_is_not_tried_for_ever(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(path: RunPath) -> None:
        raise FileExistsError(path)

    monkeypatch.setattr(runs, "claim_folder", taken)
    with pytest.raises(StoreError, match="claim"):
        claim_term(run, Point(2, NEWEST))


def test_what_nobody_could_find_again_is_not_written(run: Path) -> None:
    for name in (
        lambda: layout.base_dir(run, 1, STEP_MAX + 1),
        lambda: layout.segment_name(1, STEP_MAX + 1),
    ):
        with pytest.raises(StoreError):
            name()
    segments = Path(layout.log_dir(run, 2))
    segments.mkdir(parents=True)
    for number in (10**6, 10**18 - 1):
        (segments / f"{number}-{0:012d}.log").write_bytes(b"")
    assert layout.segments(run, 2) == [], "their names would not be in the order of their numbers"


@pytest.mark.parametrize("number", [STEP_MAX + 1, 2**62, 2**63 - 1])
@pytest.mark.parametrize("where", ["term", "step", "continues", "ancestors"])
def test_documents_with_such_numbers_are_damaged(where: str, number: int, run: Path) -> None:
    store = Store(run)
    document = next(d for d in store.of("manifest") if d.tree["term"] == 2)
    tree = document.tree
    changes: dict[str, Callable[[], object]] = {
        "term": lambda: tree.update(term=number),
        "step": lambda: tree["bases"][-1].update(step=number),
        "continues": lambda: tree["continues"].update(step=number),
        "ancestors": lambda: tree.update(ancestors=[{"term": 0, "step": number}]),
    }
    changes[where]()
    store.seal(document)
    with pytest.raises(CorruptData):
        read_manifest(run, 2)
    all_speak(run)
    assert newest_found(run) == 1


# ---------------------------------------------------------------------- bytes that are no text


@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80", b"\xc0\x80"])
def test_documents_that_are_no_utf_8_are_damaged(bad: bytes, run: Path) -> None:
    manifest = manifest_of(run, 2)
    body = manifest.read_bytes().partition(b"\n")[2]
    manifest.write_bytes(sealed("manifest", body.replace(b'"host": "', b'"host": "' + bad)))
    all_speak(run)
    assert newest_found(run) == 1


def test_a_session_that_is_no_utf_8_is_damaged(run: Path) -> None:
    store = Store(run)
    session = next(d for d in store.of("session") if d.tree["step"] == NEWEST)
    for name in ("state", "step"):
        size = bytes([0xA0 + len(name)])
        data = session.bytes().replace(size + name.encode(), size + b"\xff" * len(name))
        index = next(d for d in store.of("part") if d.tree["step"] == NEWEST)
        session.path.write_bytes(data)
        for file in index.tree["files"]:
            if (file["step"], file["kind"]) == (NEWEST, "session"):
                file.update(bytes=len(data), chunks=[xxhash.xxh3_64_hexdigest(data)])
        store.seal(index)
        code, told = says("verify", run, "--json")
        assert code == 1 and json.loads(told)["valid_steps"] == [1, 2]
        assert newest_found(run) == 2


def test_an_event_that_is_no_utf_8_is_damaged() -> None:
    from everystep.format.slot import unpack_events

    document = b"\x91\x92\xa4\xff\xff\xff\xff\xc0"
    with pytest.raises(CorruptData):
        unpack_events(document, xxhash.xxh3_64_intdigest(document))


@pytest.mark.parametrize("version", ["9" * 5000, "9" * 30, "0", "01", "-1", "x", "²"])
@pytest.mark.parametrize("right", [True, False])
def test_a_version_is_a_small_number(version: str, right: bool, run: Path) -> None:
    manifest = manifest_of(run, 2)
    body = manifest.read_bytes().partition(b"\n")[2]
    data = sealed("manifest", body, version)
    manifest.write_bytes(data if right else data.replace(b'"pid"', b'"pie"'))
    with pytest.raises(CorruptData):
        read_manifest(run, 2)
    all_speak(run)
    assert newest_found(run) == 1


def test_a_segment_of_no_run(run: Path) -> None:
    folder = Path(layout.log_dir(run, 2))
    folder.mkdir(parents=True)
    fields = (log._MAGIC, log._VERSION, b"\xff" * 32, 2, 0, NEWEST, 0)
    checksum = xxhash.xxh3_64_intdigest(log._SEGMENT.pack(*fields, 0))
    header = log._SEGMENT.pack(*fields, checksum).ljust(log.BLOCK_BYTES, b"\0")
    (folder / layout.segment_name(1, NEWEST)).write_bytes(header)
    all_speak(run)
    assert newest_found(run) == NEWEST


# ---------------------------------------------------------------------- what contradicts itself


def test_a_tensor_has_at_most_64_dimensions(run: Path) -> None:
    store = Store(run)
    base, index = (
        next(d for d in store.of(kind) if d.tree["step"] == NEWEST) for kind in ("base", "part")
    )
    shape = [1] * 100 + [200]
    base.tree["census"]["atoms"][0]["shape"] = shape
    for tensor in index.tree["tensors"]:
        if (tensor["atom"], tensor["slot"]) == (0, ""):
            tensor["shape"] = shape
    store.seal(base)
    store.seal(index)
    all_speak(run)
    code, told = says("verify", run, "--json")
    assert code == 1 and json.loads(told)["valid_steps"] == [1, 2]


WRONG_SESSIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no groups": lambda tree: tree.update(groups=[]),
    "two groups for one": lambda tree: tree["groups"].__setitem__(
        0, Inner([{"dict": [["lr", 0.1]]}] * 2)
    ),
    "slots that are a list": lambda tree: tree["values"][0].__setitem__(2, Inner([1, 2])),
}


@pytest.mark.parametrize("lie", WRONG_SESSIONS)
def test_what_cannot_be_exported_is_not_called_valid(lie: str, run: Path, tmp_path: Path) -> None:
    store = Store(run)
    session = next(d for d in store.of("session") if d.tree["step"] == 2)
    WRONG_SESSIONS[lie](session.tree)
    store.seal(session)
    code, told = says("verify", run, "--json")
    assert code == 1 and json.loads(told)["valid_steps"] == [1, 3]
    assert says("export", run, 2, "--to", "torch", "--file", tmp_path / "out.pt")[0] == 2


# ---------------------------------------------------------------------- what the system refuses


def test_a_link_without_end_is_refused_in_our_words(run: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for words in (*READERS, ("tag", "1", "mine"), ("rewind", "1", "--yes"), ("stop",)):
        code, told = says(words[0], loop, *words[1:])
        assert code == 2 and str(loop) in told, told


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """The system refuses to open what has this name; root would be let in where others are not."""
    opened = os.open

    def refuse(name: str, errno: int) -> None:
        def open_(path: Any, *args: Any, **more: Any) -> int:
            if os.fsdecode(path) == name if not isinstance(path, int) else False:
                raise OSError(errno, os.strerror(errno))
            return opened(path, *args, **more)

        monkeypatch.setattr(os, "open", open_)

    yield refuse


@pytest.mark.parametrize("errno", [13, 5, 116])
def test_a_folder_that_cannot_be_opened_is_refused_in_our_words(
    errno: int, run: Path, refused: Callable[[str, int], None]
) -> None:
    refused("terms", errno)
    for words in (*READERS, ("tag", "1", "mine"), ("rewind", "1", "--yes"), ("stop",)):
        code, told = says(words[0], run, *words[1:])
        assert code == 2 and "terms" in told and os.strerror(errno) in told, told
    with pytest.raises(StoreError) as refusal:
        find_newest(run, None)
    assert refusal.value.hint


@pytest.mark.parametrize("errno", [13, 5])
def test_a_manifest_that_cannot_be_read_is_a_problem_of_its_term(
    errno: int, run: Path, refused: Callable[[str, int], None]
) -> None:
    """For whoever looks; who goes on from the run, or removes what does not count, must not take what cannot
    be read just now for what is not there."""
    refused("manifest.json", errno)
    code, told = says("verify", run, "--json")
    assert code == 1 and "manifest.json" in json.loads(told)["problems"][0]
    assert says("ls", run)[0] in (0, 1)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        find_newest(run, None)
    says("prune", run, "--keep-last", "1", "--force")
    assert len(list(run.rglob("index.json"))) == 3


def test_a_manifest_that_vanishes_is_one_that_is_not_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked at first, and read afterwards."""
    monkeypatch.setattr(runs, "look_at", lambda path: True, raising=False)
    manifest_of(run, 2).unlink()
    assert read_manifest(run, 2) is None
    assert newest_found(run) == 1


def test_bases_reached_through_a_link_are_refused_though_they_are_valid(
    run: Path, tmp_path: Path
) -> None:
    bases = run / "terms" / "000002" / "bases"
    bases.rename(tmp_path / "bases")
    bases.symlink_to(tmp_path / "bases")
    code, told = says("verify", run, "--json")
    found = json.loads(told)
    assert code == 1 and found["valid_steps"] == [1]
    assert any(str(bases) in problem and "link" in problem for problem in found["problems"])
    assert newest_found(run) == 1
    with pytest.raises(CorruptData, match="link"):
        read_base(run, read_lineage(run).candidates[0])


# ---------------------------------------------------------------------- time


def test_a_segment_of_holes_is_read_at_once(run: Path) -> None:
    """Padding is shorter than a block: a whole block of zeros is the end."""
    lineage = read_lineage(run)
    header = log.SegmentHeader(lineage.run_id, 2, 0, NEWEST, log.census_digest(census(200)))
    folder = Path(layout.log_dir(run, 2))
    folder.mkdir(parents=True)
    path = folder / layout.segment_name(1, NEWEST)
    path.write_bytes(log.pack_segment_header(header))
    os.truncate(path, 64 << 30)
    began = time.monotonic()
    assert newest_found(run) == NEWEST
    says("status", run)
    assert time.monotonic() - began < 10


COLLIDING: dict[str, Callable[[int], Any]] = {
    "large integers": lambda k: {"int": str(k * M61)},
    "in tuples": lambda k: {"tuple": [{"int": str(k * M61)}]},
    "complex numbers": lambda k: {"complex": [-1000003.0 * k, float(k)]},
}


@pytest.mark.parametrize("kind", COLLIDING)
@pytest.mark.parametrize("tag", ["set", "frozenset", "dict", "ordered", "counter"])
def test_keys_of_one_hash_are_refused(tag: str, kind: str) -> None:
    """Each of them was compared with all before it."""
    keys = [COLLIDING[kind](k) for k in range(1, 30_000)]
    body = keys if "set" in tag else [[key, 0] for key in keys]
    data = msgspec.msgpack.encode({tag: body})
    began = time.monotonic()
    with pytest.raises(CorruptData):
        decode(data)
    assert time.monotonic() - began < 5


def test_many_ordinary_keys_are_read() -> None:
    for keys in (range(-5000, 5000), [(a, b) for a in range(80) for b in range(80)]):
        for value in (set(keys), dict.fromkeys(keys, 1.0), {float(k) for k in range(5000)}):
            assert decode(encode(value, "state")) == value


def test_a_presence_has_a_bit_for_each_atom() -> None:
    atoms = census(200)
    for presence in (b"\1" * 2, b"\0" * 10_000_000, b""):
        with pytest.raises(CorruptData, match="presence"):
            check_entry([Call(0, b"", presence, 0, {})], 10_000, atoms, "entry")
    check_entry([Call(0, b"", b"\3", 0, {})], 10_000, atoms, "entry")
    for name in ("zeros", "held", "sparse"):
        pending = msgspec.structs.replace(Presence(), **{name: b"\0" * 10_000_000})
        with pytest.raises(CorruptData, match="presence"):
            check_entry([Seal(1, 0, b"", b"", (b"",), 0, None, pending)], 0, atoms, "entry")


# ---------------------------------------------------------------------- memory

_IN_ITS_OWN = """
import resource, sys
from typer.testing import CliRunner
from everystep.cli.app import app
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def work(path): return CliRunner().invoke(app, ["verify", path, "--json"])
work(sys.argv[1])
before = peak()
done = work(sys.argv[2])
print(done.exit_code, peak() - before)
"""


def grown_by_verify(valid: Path, run: Path) -> tuple[int, int]:
    """Its exit code, and how many bytes of memory it took more than for a valid run."""
    words = [sys.executable, "-c", _IN_ITS_OWN, str(valid), str(run)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert not done.returncode, done.stderr
    code, grown = done.stdout.split()
    return int(code), int(grown) << 10


@pytest.mark.parametrize("kind", ["session", "tail"])
@pytest.mark.parametrize("size", [600 << 20, 3 << 30])
def test_verify_of_holes_takes_no_memory(kind: str, size: int, run: Path, tmp_path: Path) -> None:
    """They were read whole, twice."""
    build(tmp_path / "valid", 200)
    store = Store(run)
    index = next(d for d in store.of("part") if d.tree["step"] == NEWEST)
    file = next(f for f in index.tree["files"] if (f["step"], f["kind"]) == (NEWEST, kind))
    path = next(p for p in run.rglob(f"{kind}.bin") if p.parents[2].name.endswith(str(NEWEST)))
    data = path.read_bytes()
    os.truncate(path, size)
    empty = xxhash.xxh3_64_hexdigest(bytes(CHUNK_BYTES))
    first = xxhash.xxh3_64_hexdigest(data.ljust(CHUNK_BYTES, b"\0"))
    file.update(bytes=size, chunks=[first] + [empty] * (size // CHUNK_BYTES - 1))
    store.seal(index)
    code, grown = grown_by_verify(tmp_path / "valid", run)
    assert code == 1
    assert grown < 200 << 20


def test_a_file_of_another_size_is_refused_before_it_is_brought_in(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everystep.store import bases

    brought: list[int] = []
    monkeypatch.setattr(bases, "read_ahead", lambda view, begin, end: brought.append(end))
    (file, *_) = read_base(run, read_lineage(run).candidates[0]).files
    path = layout.file_path(run, file)
    os.truncate(path, 1 << 33)
    with pytest.raises(CorruptData, match="the index says"):
        bases.open_checked(run, file)
    assert brought == []
