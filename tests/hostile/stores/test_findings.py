"""What hostile stores have done before, one by one; `make hostile` looks for more. Outside of the run lies
bait, which nobody may touch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ondisk
import pytest
from states import random_states
from store.small_store import build, census, snapshot
from typer.testing import CliRunner

from everystep.cli.app import app
from everystep.core.events import Planes, Seal
from everystep.core.retention import Rules
from everystep.errors import CorruptData, EverystepError, UnknownVersion
from everystep.format.base import Point
from everystep.format.checks import check_entry
from everystep.format.entry import frame_entry
from everystep.format.log import LoggedRecord, census_digest
from everystep.format.planes import CHUNK_BYTES as PACKED_CHUNK
from everystep.format.planes import check_planes, unpack_planes
from everystep.format.slot import pack_events
from everystep.format.values import decode
from everystep.recover.find import find_newest
from everystep.store import layout
from everystep.store.bucket import fetch
from everystep.store.bucket.client import Bucket
from everystep.store.bucket.ship import BaseShipper
from everystep.store.bucket.tiers import sync_from_bucket
from everystep.store.disk import files
from everystep.store.disk.commit import write_document
from everystep.store.disk.files import TEMPORARY_PREFIX, create_file, temporary_for
from everystep.store.disk.meter import Throttle
from everystep.store.disk.stream import StreamWriter
from everystep.store.log import LogWriter
from everystep.store.reader import StoredRun
from everystep.store.tags import set_tag
from everystep.store.term import TermWriter
from everystep.text import printable, redacted

from .documents import Document, Store, closed

NEWEST = 3
WAYS_OUT = ("{outside}/bait", "../outside/bait", "../../../../outside/bait", "weights/../../x", "")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Terms 1 and 2 of three bases, beside a folder that has to be the same afterwards."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "bait").write_bytes(b"bait")
    (outside / "folder" / "weights.safetensors").write_bytes(b"somebody's")
    build(tmp_path / "run", 200)
    yield tmp_path / "run"
    found = {p.relative_to(outside): p.is_file() and p.read_bytes() for p in outside.rglob("*")}
    assert found == {
        Path("folder"): False,
        Path("folder/weights.safetensors"): b"somebody's",
        Path("bait"): b"bait",
    }


def says(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.output


def newest_of(store: Store, kind: str) -> Document:
    return next(d for d in store.of(kind) if d.tree["step"] == NEWEST)


def change_newest(run: Path, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    store = Store(run)
    document = newest_of(store, kind)
    change(document.tree)
    store.seal(document)


def falls_back(run: Path) -> None:
    """The newest base is refused, by loading and by verify; an older one serves."""
    found, _ = find_newest(run, None)
    assert found is not None and found.point.step == NEWEST - 1
    assert refused_by_verify(run)


def refused_by_verify(run: Path) -> bool:
    code, told = says("verify", run, "--json")
    return code == 1 and json.loads(told)["valid_steps"] == [1, 2]


def as_bucket(run: Path, tmp_path: Path) -> str:
    url = f"file://{tmp_path / 'bucket'}"
    BaseShipper(Bucket(url), run, 2, Throttle(0)).turn()
    return url


# ---------------------------------------------------------------------- places outside


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("key", ["path", "kind", "rank", "root"])
def test_an_index_cannot_name_a_place_outside(
    key: str, way: str, run: Path, tmp_path: Path
) -> None:
    url = as_bucket(run, tmp_path)
    store = Store(tmp_path / "bucket")
    index = newest_of(store, "part")
    index.tree["files"][0][key] = way.format(outside=tmp_path / "outside")
    store.seal(index)
    for words in (("ls",), ("verify",), ("inspect",)):
        says(words[0], url)
    try:
        sync_from_bucket(tmp_path / "fetched", url)
    except CorruptData:
        assert key != "path"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        {p.name for p in tmp_path.iterdir()} & {"run", "outside", "bucket", "fetched"}
    )


@pytest.mark.parametrize("name", ["{outside}/bait", "../../outside/x", "..", "a/b", "", "x" * 300])
def test_a_tag_cannot_name_a_place_outside(
    name: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_tag(run, "mine", NEWEST)
    url = as_bucket(run, tmp_path)
    store = Store(tmp_path / "bucket")
    commit = max(store.of("commit"), key=lambda document: document.path.name)
    commit.tree["tags"][0]["name"] = name.format(outside=tmp_path / "outside")
    store.seal(commit)
    for command in ("ls", "verify"):
        says(command, url)
    sync_from_bucket(tmp_path / "fetched", url)  # what the commit before said
    assert {path.name for path in (tmp_path / "fetched").glob("tags/*")} <= {"mine.json"}
    assert "a tag" in caplog.text


@pytest.mark.parametrize("place", ["terms", "terms/000001", "terms/000001/bases", "tags"])
def test_a_link_inside_a_run_is_not_followed(place: str, run: Path, tmp_path: Path) -> None:
    link = run / place
    if link.exists():
        link.rename(tmp_path / "moved")
    link.symlink_to(tmp_path / "outside" / "folder")
    says("prune", run, "--keep-last", "1", "--force")
    with pytest.raises(EverystepError) as refusal:
        writer = TermWriter(run, Point(2, NEWEST), Rules(1))
        for step in (1, 2, 3):
            writer.commit(snapshot(step, 200))
            writer.apply_retention()
        set_tag(run, "mine", NEWEST)
    assert str(link) in str(refusal.value), "the link is named"


def test_a_run_may_itself_be_reached_through_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    assert says("verify", tmp_path / "link")[0] == 0


def test_links_under_the_names_of_temporary_files_are_passed_over(
    run: Path, tmp_path: Path
) -> None:
    """Names that could be guessed, as they once were made of the process's number: what was planted there is
    neither followed nor in the way."""
    url = as_bucket(run, tmp_path)
    (run / "tags").mkdir()
    writer = TermWriter(run, Point(2, NEWEST), Rules(3))
    plant_at_guessable_names(run, tmp_path / "outside" / "bait")
    set_tag(run, "mine", NEWEST)
    newest = ondisk.part_dir(run, 2, NEWEST)
    (newest / "weights.safetensors").unlink()
    sync_from_bucket(run, url)
    assert (newest / "weights.safetensors").is_file()
    writer.commit(snapshot(NEWEST, 200))
    plant_at_guessable_names(tmp_path / "bucket", tmp_path / "outside" / "bait")
    BaseShipper(Bucket(url), run, 3, Throttle(0)).turn()
    for holder in (run, url):
        code, told = says("verify", holder, "--json")
        assert code == 0 and set(json.loads(told)["valid_steps"]) == {1, 2, NEWEST}


def plant_at_guessable_names(top: Path, bait: Path) -> None:
    """In every folder, for every name that we write."""
    pid, host = os.getpid(), fetch._host()
    names = ("manifest.json", "index.json", "mine.json", "everystep.json", "session.bin", "probe")
    names += ("base.json", "weights.safetensors", "slots.safetensors", "tail.bin")
    for folder in [top, *(p for p in top.rglob("*") if p.is_dir())]:
        there = {path.name for path in folder.iterdir()}
        for name in {*names, *there}:
            for guess in (
                *(f"{TEMPORARY_PREFIX}{name}", f".{name}", f"{name}.tmp"),
                *(f"{TEMPORARY_PREFIX}{name}-{pid}", f".{name}.{pid}", f"{name}-{pid}"),
                f"{TEMPORARY_PREFIX}{host}{pid}-{name}",
                f"{TEMPORARY_PREFIX}{host}{pid}-{name}-{pid}",
            ):
                (folder / guess).symlink_to(bait)


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to, None])
def test_what_has_the_very_name_of_a_temporary_file_stays_as_it_is(
    plant: Callable[[Path, Path], None] | None,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever guesses the part that is drawn: the file of his is neither followed nor written over."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0" * 2 * count)
    manifest = layout.manifest_path(run, 2)
    guessed, bait = Path(temporary_for(manifest)), tmp_path / "outside" / "bait"
    if plant is None:
        guessed.symlink_to(tmp_path / "outside" / "new")  # what is not there must not be made
    else:
        plant(guessed, bait)
    before = Path(manifest).read_bytes(), guessed.lstat()
    for write in (create_file, lambda path: StreamWriter(path).close()):
        with pytest.raises(FileExistsError):
            write(temporary_for(manifest))
    with pytest.raises(FileExistsError):
        write_document(manifest, b"ours")
    assert (Path(manifest).read_bytes(), guessed.lstat()) == before


def test_a_temporary_name_is_drawn(run: Path) -> None:
    path = layout.manifest_path(run, 2)
    drawn = {temporary_for(path).name for _ in range(100)}
    assert len(drawn) == 100
    rest = {name.removeprefix(f"{TEMPORARY_PREFIX}{path.name}-") for name in drawn}
    assert all(len(bytes.fromhex(word)) == 8 for word in rest)


# ---------------------------------------------------------------------- what values say


@pytest.mark.parametrize("name", ["load", "tensor", "cuda", "__doc__", "quint8", "float33", ""])
def test_a_type_is_one_of_a_table(name: str, run: Path) -> None:
    """It was looked up in torch: state came back holding torch.load."""
    store = Store(run)
    session = next(d for d in store.of("session") if d.tree["step"] == NEWEST)
    session.tree["state"].tree = {"tensor": [name, [2], b"\0" * 8, "cpu"]}
    store.seal(session)
    with pytest.raises(CorruptData):
        decode(closed(session.tree["state"]), "state")
    assert refused_by_verify(run)


def place_in(tree: dict[str, Any], number: int) -> dict[str, Any]:
    found: dict[str, Any] = tree["tensors"][number]["place"]
    return found


SIZES_THAT_LIE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no bytes for a shape": lambda tree: place_in(tree, 0).update(bytes=0),
    "fewer bytes than the shape": lambda tree: place_in(tree, 0).update(bytes=100),
    "a shape that is larger": lambda tree: tree["tensors"][0].update(shape=[10**9]),
    "a negative place": lambda tree: place_in(tree, 0).update(at=-200),
    "a place behind the file's end": lambda tree: place_in(tree, 0).update(at=10**6),
    "one over the other": lambda tree: place_in(tree, -1).update(at=place_in(tree, -2)["at"] + 1),
    "a file there is none of": lambda tree: place_in(tree, 0).update(holder=9),
    "an atom there is none of": lambda tree: tree["tensors"][0].update(atom=9),
    "a negative shape": lambda tree: tree["tensors"][0].update(shape=[-200]),
    "half of an atom": lambda tree: tree["tensors"][0].update(regions=[[[0], [100]]]),
    "regions that lie": lambda tree: tree["tensors"][0].update(regions=[[[1], [200]]]),
    "a step of its own": lambda tree: tree.update(step=7),
    "a rank of its own": lambda tree: tree.update(rank=1),
    "a file of another rank": lambda tree: tree["files"][-1].update(rank=1),
    "a disk that nobody gave": lambda tree: tree["files"][0].update(root=1),
}

BASES_THAT_LIE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no parts": lambda tree: tree.update(parts=[]),
    "a part of another rank": lambda tree: tree["parts"][0].update(rank=1),
    "a rank that no job has": lambda tree: tree["parts"][0].update(rank=10**6),
    "another part": lambda tree: tree["parts"][0].update(digest="0" * 32),
    "a step of its own": lambda tree: tree.update(step=7),
    "an atom more": lambda tree: tree["census"]["atoms"].append(
        {"name": "more", "dtype": "uint8", "shape": [1]}
    ),
    "an atom less": lambda tree: tree["census"]["atoms"].pop(),
}


@pytest.mark.parametrize("lie", SIZES_THAT_LIE)
def test_sizes_are_held_against_each_other(lie: str, run: Path) -> None:
    """Bytes that nobody wrote became weights."""
    change_newest(run, "part", SIZES_THAT_LIE[lie])
    falls_back(run)


@pytest.mark.parametrize("lie", BASES_THAT_LIE)
def test_a_base_and_its_parts_are_held_against_each_other(lie: str, run: Path) -> None:
    change_newest(run, "base", BASES_THAT_LIE[lie])
    falls_back(run)


def test_a_base_of_many_ranks_is_not_passed_over(run: Path) -> None:
    """What lies behind it was trained by a job that this everystep does not know."""
    change_newest(run, "base", lambda tree: tree["parts"].append({"rank": 1, "digest": "0" * 32}))
    with pytest.raises(UnknownVersion, match="2 ranks"):
        find_newest(run, None)
    assert refused_by_verify(run)


def test_what_unpacks_to_more_than_is_said_is_refused_unread() -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))
    assert len(bomb) < 1 << 20
    for claimed, words in ((4096, "a chunk of more than"), (1 << 40, "chunks for")):
        planes = Planes(bytes=claimed, width=4, sizes=(len(bomb),))
        for work in (lambda p: unpack_planes(p, memoryview(bomb), 1), check_of(bomb)):
            tracemalloc.start()
            with pytest.raises(CorruptData, match=words):
                work(planes)
            assert tracemalloc.get_traced_memory()[1] < 1 << 26
            tracemalloc.stop()


def check_of(data: bytes) -> Callable[[Planes], None]:
    return lambda planes: check_planes(planes, memoryview(data))


def test_what_agrees_with_itself_is_held_against_what_its_events_take(run: Path) -> None:
    """Every chunk is right, all of them are as long as is said, and they are gigabytes in a small file."""
    zstandard = pytest.importorskip("zstandard")
    chunk, count = zstandard.ZstdCompressor(level=1).compress(bytes(PACKED_CHUNK)), 1600
    planes = Planes(bytes=count * PACKED_CHUNK, width=4, sizes=(len(chunk),) * count)
    assert planes.bytes > 6 << 30 and count * len(chunk) < 1 << 20
    seal = Seal(NEWEST + 1, NEWEST, random_states(), b"", (b"",), 0)
    with pytest.raises(CorruptData, match=r"expected at most .* for its events"):
        check_entry([planes, seal], count * len(chunk), census(200), "entry")
    body = frame_entry(*pack_events([planes, seal]), chunk * count)
    run_id = Store(run).of("run")[0].tree["run_id"]
    log = LogWriter(run, run_id, 2, census_digest(census(200)))
    log.append([LoggedRecord(NEWEST + 1, NEWEST, memoryview(body))])
    log.close()
    tracemalloc.start()
    found, _ = find_newest(run, None)
    assert found is not None and found.point.step == NEWEST
    assert any("for its events" in problem for problem in found.problems)
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()
    told = json.loads(says("verify", run, "--json")[1])
    assert told["log_step"] is None and any("for its events" in note for note in told["notes"])


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_deep_documents_are_corrupt_data(depth: int, run: Path) -> None:
    with pytest.raises(CorruptData):
        decode(b"\x91" * depth + b"\xc0", "state")
    manifest = run / "terms" / "000002" / ondisk.MANIFEST
    header = manifest.read_bytes().partition(b"\n")[0]
    manifest.write_bytes(header + b"\n" + b"[" * depth + b"]" * depth)
    for command in ("ls", "verify", "status"):
        says(command, run)


# ---------------------------------------------------------------------- files of another kind


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)
        made.bind(path.name)
        os.chdir(here)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [_pipe, _socket, _device, Path.mkdir], ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    "name",
    [
        *("everystep.json", "manifest.json", "base.json", "index.json"),
        *("weights.safetensors", "session.bin"),
    ],
)
def test_nobody_waits_for_a_file_that_is_none(
    name: str, make: Callable[[Path], None], run: Path
) -> None:
    path = next(p for p in sorted(run.rglob(name), reverse=True))
    path.unlink()
    make(path)
    for command in (["ls"], ["verify"], ["inspect"], ["prune", "--dry-run"]):
        says(command[0], run, *command[1:])


def test_names_that_are_no_numbers_are_not_ours(run: Path) -> None:
    for folder in (run / "terms", run / "terms" / "000002" / "bases"):
        for name in ("²", "٣", "1e3", "-1", " 1", "0x1", "000002 "):
            (folder / name).mkdir()
    assert says("verify", run)[0] == 0
    says("prune", run, "--keep-last", "1", "--force")
    writer = TermWriter(run, Point(2, NEWEST), Rules(1))
    writer.commit(snapshot(NEWEST, 200))
    writer.apply_retention()


def test_right_checksums_do_not_tell_who_wrote(run: Path) -> None:
    """Nothing is signed: what somebody puts into a run, and seals, is what the run says."""
    store = Store(run)
    session = next(d for d in store.of("session") if d.tree["step"] == NEWEST)
    session.tree["state"].tree = {"dict": [["step", 77]]}
    store.seal(session)
    assert says("verify", run)[0] == 0
    assert StoredRun(run).state() == {"step": 77}


# ---------------------------------------------------------------------- what is shown


@pytest.mark.parametrize(
    "name", ["[/red]", "[bold]x", "\x1b[31mred", "\x1b]0;title\x07", "\u202eevil"]
)
def test_names_do_nothing_to_a_terminal(name: str, run: Path) -> None:
    def rename(tree: dict[str, Any]) -> None:
        tree["census"]["atoms"][0]["name"] = name

    change_newest(run, "base", rename)
    for words in (["inspect", NEWEST], ["ls"], ["verify"], ["diff", NEWEST - 1, NEWEST]):
        _, told = says(words[0], run, *words[1:])
        assert not set(told) & set("\x1b\x07\u202e"), told
    if name.startswith("["):
        assert name in says("inspect", run, NEWEST)[1], "and it is shown as it is"
    told = str(EverystepError(f"read {run}: no tensor {name}", hint=f"look for {name}"))
    assert not set(told) & set("\x1b\x07\u202e")


def test_credentials_are_not_shown() -> None:
    url = "s3://AKIA:secret@bucket/prefix?token=hidden"
    assert redacted(url) == "s3://bucket/prefix"
    with pytest.raises(EverystepError) as refusal:
        Bucket("ftp://user:secret@host/x?token=hidden")
    assert "secret" not in str(refusal.value) and "hidden" not in str(refusal.value)
    assert printable("a\x1bb") == "a\\x1bb"


def test_errors_of_the_system_name_the_path(run: Path) -> None:
    shutil.rmtree(run / "terms")
    (run / "terms").write_bytes(b"a file")
    with pytest.raises((OSError, EverystepError)) as refusal:
        TermWriter(run, None, Rules(1))
    assert str(run / "terms") in str(refusal.value)
