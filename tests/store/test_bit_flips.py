"""Damage to any byte of a store is reported by verify and never loaded; the newest whole base is.

A small store is flipped byte by byte, a large file in every chunk and at its borders. Files are also
cut, extended, removed and swapped. EVERYSTEP_SEED repeats the choice of bits,
EVERYSTEP_FLIPS=all leaves no byte out of the older bases' indexes either.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import ondisk
import pytest

from everystep.errors import NothingToRecover, StoreError, UnknownVersion
from everystep.format.base import CHUNK_BYTES
from everystep.format.document import VERSION
from everystep.store.reader import open_run
from everystep.store.verify import verify_run

from .small_store import LARGE, SMALL, STEPS, build, needs, newest

SEED = int(os.environ.get("EVERYSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
ALL = os.environ.get("EVERYSTEP_FLIPS") == "all"
NEEDS: dict[int, set[str]] = {}  # the same for a small and a large store


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    for size in (SMALL, LARGE):
        run = folder / str(size)
        build(run, size)
        assert verify_run(run).problems == [] and verify_run(run).valid == [3, 2, 1]
    NEEDS.update(needs(run))
    assert set(NEEDS) == set(STEPS) and needs(folder / str(SMALL)) == NEEDS
    for step in (2, 3):
        shared = NEEDS[step] & NEEDS[step - 1]
        assert any(path.endswith(ondisk.WEIGHTS) for path in shared), "no file is shared"
    return folder


@pytest.fixture
def run(pristine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Path:
    caplog.set_level(logging.CRITICAL, "everystep")  # thousands of bases are skipped here
    shutil.copytree(pristine / str(SMALL), tmp_path / "run")
    return tmp_path / "run"


def check_damage(run: Path, path: Path, what: str) -> None:
    """Verify speaks up, and resume takes the newest base that does not need the damaged file."""
    name = str(path.relative_to(run))
    try:
        report = verify_run(run)
        assert report.problems, f"{what}: verify says all is well"
    except StoreError:
        pass
    whole = [step for step, files in NEEDS.items() if name not in files]
    try:
        found = newest(run)
    except StoreError as error:
        raise AssertionError(f"{what}: instead of falling back: {error!r}") from error
    step = found.point.step if found else None
    assert step == max(whole, default=None), f"{what}: resumes at {step}, whole are {whole}"


def all_names() -> list[str]:
    one, two = "terms/000001", "terms/000002"
    base = [f"{one}/bases/{1:012d}", f"{two}/bases/{2:012d}", f"{two}/bases/{3:012d}"]
    inside = [ondisk.INDEX, ondisk.WEIGHTS, ondisk.SLOTS, ondisk.SESSION]
    names = [f"{folder}/parts/000000/{name}" for folder in base for name in inside]
    names += [f"{folder}/{ondisk.BASE}" for folder in base]
    names += [
        f"{base[2]}/parts/000000/{ondisk.TAIL}",
        f"{one}/manifest.json",
        f"{two}/manifest.json",
    ]
    return [ondisk.RUN_DOCUMENT, *names]


def test_names_are_all_files(pristine: Path) -> None:
    """The flips below leave no file out."""
    for size in (SMALL, LARGE):
        run = pristine / str(size)
        files = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
        assert files == set(all_names())


def flip(run: Path, name: str, places: Iterable[int], chance: random.Random) -> None:
    path = run / name
    with path.open("r+b", buffering=0) as file:
        for at in places:
            old = os.pread(file.fileno(), 1, at)
            bit = chance.randrange(8)
            os.pwrite(file.fileno(), bytes([old[0] ^ (1 << bit)]), at)
            check_damage(run, path, f"{name} byte {at} bit {bit}")
            os.pwrite(file.fileno(), old, at)
    assert verify_run(run).problems == []


@pytest.mark.parametrize("name", all_names())
def test_every_byte(name: str, run: Path) -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    chance = random.Random(f"{SEED} {name}")
    older = f"/{3:012d}/" not in name and name.endswith((ondisk.INDEX, ondisk.BASE))
    stride = 4 if older and not ALL else 1  # their bytes are checked by the same code
    flip(run, name, range(chance.randrange(stride), (run / name).stat().st_size, stride), chance)


def test_every_chunk_of_a_large_file(pristine: Path, run: Path, tmp_path: Path) -> None:
    print(f"EVERYSTEP_SEED={SEED}")
    chance = random.Random(SEED)
    large = shutil.copytree(pristine / str(LARGE), tmp_path / "large")
    name = f"terms/000001/bases/{1:012d}/parts/000000/{ondisk.WEIGHTS}"
    size = (large / name).stat().st_size
    assert size > 2 * CHUNK_BYTES
    for start in range(0, size, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, size)
        inside = sorted(chance.randrange(start, end) for _ in range(8))
        flip(large, name, [start, start + 1, *inside, end - 1], chance)


@pytest.mark.parametrize("name", [n for n in all_names() if n.endswith(".json")])
def test_every_bit_of_a_header_line(name: str, run: Path) -> None:
    """A flip can turn a version into a newer one, or a length into another number."""
    path = run / name
    data = path.read_bytes()
    for at in range(data.index(b"\n") + 1):
        for bit in range(8):
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :])
            check_damage(run, path, f"{name} byte {at} bit {bit}")


@pytest.mark.parametrize("name", all_names())
def test_cut_extended_emptied_missing(name: str, run: Path) -> None:
    path = run / name
    data = path.read_bytes()
    for size in sorted({0, 1, len(data) // 2, len(data) - 1}):
        path.write_bytes(data[:size])
        check_damage(run, path, f"{name} cut to {size} bytes")
    path.write_bytes(data + b"\0")
    check_damage(run, path, f"{name} one byte longer")
    path.write_bytes(data)
    if path.name not in (ondisk.MANIFEST, ondisk.RUN_DOCUMENT):
        path.unlink()  # a claimed term without a manifest is no damage, it was never opened
        check_damage(run, path, f"{name} missing")


def test_swapped_files(run: Path) -> None:
    """Whole, well-formed files in each other's place: their own checksums alone do not tell."""
    two, three = (run / f"terms/000002/bases/{step:012d}" for step in (2, 3))
    inside = (ondisk.INDEX, ondisk.WEIGHTS, ondisk.SLOTS, ondisk.SESSION)
    for name in (ondisk.BASE, *(f"parts/000000/{name}" for name in inside)):
        _swap(two / name, three / name)
        assert verify_run(run).problems
        found = newest(run)
        assert found is not None and found.point.step == 1, name
        _swap(two / name, three / name)
    manifests = [run / f"terms/00000{n}/manifest.json" for n in (1, 2)]
    _swap(*manifests)
    assert verify_run(run).problems
    with pytest.raises(NothingToRecover, match="no step in it is whole"):
        newest(run)


def _swap(one: Path, other: Path) -> None:
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


@pytest.mark.parametrize("name", [ondisk.RUN_DOCUMENT, "terms/000002/manifest.json"])
def test_newer_format_is_refused_clearly(name: str, run: Path) -> None:
    from everystep.format.document import _digest

    path = run / name
    line, _, body = path.read_bytes().partition(b"\n")
    head = f"{line.split()[1].decode()} {VERSION + 1} {len(body)}"
    path.write_bytes(f"everystep {head} {_digest(head, body)}\n".encode() + body)
    for use in (verify_run, open_run, newest):
        with pytest.raises(UnknownVersion, match=f"version {VERSION + 1}.*up to {VERSION}") as e:
            use(run)
        assert "upgrade" in (e.value.hint or "")
