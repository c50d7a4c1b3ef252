"""Ctrl-C: the command ends within a moment with code 130 and one line, and leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import ondisk
import pytest
import xxhash
from cli.terminal import Terminal, on_terminal
from conftest import shadows_in
from store.small_store import SMALL, snapshot

from everystep.core.retention import Rules
from everystep.format.base import CHUNK_BYTES, PartEntry, StoredFile
from everystep.format.document import pack_document
from everystep.store.bases import read_base
from everystep.store.runs import newest_manifest, read_lineage, write_manifest
from everystep.store.term import TermWriter

CTRL_C = "\x03"
HUGE_BYTES = 256 << 30  # nobody reads that in the time a test has


def store_with_a_huge_file(run: Path) -> None:
    """A base that names one sparse file more: every chunk of it is right, and reading them takes minutes."""
    TermWriter(run, None, Rules()).commit(snapshot(1, SMALL))
    (candidate,) = read_lineage(run).candidates
    document, (part,) = read_base(run, candidate)
    other = ondisk.part_dir(run, 1, 2)
    other.mkdir(parents=True)
    with (other / ondisk.SLOTS).open("wb") as file:
        file.truncate(HUGE_BYTES)
    chunks = (xxhash.xxh3_64_hexdigest(bytes(CHUNK_BYTES)),) * (HUGE_BYTES // CHUNK_BYTES)
    huge = StoredFile(1, 2, 0, "slots", HUGE_BYTES, chunks)
    data = pack_document("part", msgspec.structs.replace(part, files=(*part.files, huge)))
    (ondisk.part_dir(run, 1, 1) / ondisk.INDEX).write_bytes(data)
    entry = PartEntry(0, xxhash.xxh3_128_hexdigest(data))
    data = pack_document("base", msgspec.structs.replace(document, parts=(entry,)))
    (ondisk.base_dir(run, 1, 1) / ondisk.BASE).write_bytes(data)
    entry = msgspec.structs.replace(candidate.entry, digest=xxhash.xxh3_128_hexdigest(data))
    manifest = newest_manifest(run)
    assert manifest is not None
    write_manifest(run, msgspec.structs.replace(manifest, bases=(entry,)))


def interrupt(terminal: Terminal) -> list[str]:
    """Type it; returns the lines that are left on the screen."""
    terminal.type(CTRL_C)
    assert terminal.finish() == 130, terminal.shown[-500:]
    hidden, shown = terminal.shown.rfind("\x1b[?25l"), terminal.shown.rfind("\x1b[?25h")
    assert shown >= hidden, "the cursor is hidden"
    plain = re.sub(r"\x1b\[[0-9;?]*\w", "", terminal.shown)
    assert "Traceback" not in plain and plain.count("interrupted") == 1, plain[-500:]
    return [line.rpartition("\r")[2] for line in plain.replace("\r\n", "\n").strip().split("\n")]


def test_a_verify_that_would_take_minutes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store_with_a_huge_file(run)
    before = sorted(run.rglob("*"))
    with on_terminal("verify", run) as terminal:
        terminal.wait_for("274.9 GB")  # the small files are done, and a thread reads the huge one
        began = time.monotonic()
        lines = interrupt(terminal)
        assert time.monotonic() - began < 30
    assert lines[-1] == "interrupted" and lines[-2].startswith("verify"), lines
    assert sorted(run.rglob("*")) == before


STUBBORN = """
import time
from everystep.cli import output
commands = output.Commands()
@commands.command()
def work() -> output.Reply:
    try:
        print("works", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("cleans up", flush=True)
        time.sleep(600)
commands()
"""


def test_a_second_one_ends_what_is_stuck() -> None:
    with on_terminal(program=("-c", STUBBORN)) as terminal:
        terminal.wait_for("works")
        terminal.type(CTRL_C)
        terminal.wait_for("cleans up")
        deadline = time.monotonic() + 60
        while terminal.process.poll() is None:
            assert time.monotonic() < deadline
            terminal.type(CTRL_C)  # the first of them come too soon to be meant
            time.sleep(0.1)
        assert terminal.finish() == 130 and "Traceback" not in terminal.shown


def folder_with(name: str) -> Callable[[Path], bool]:
    return lambda place: any(place.glob(name))


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        (("bench", "verify", "--gigabytes", "2"), folder_with("everystep-bench-*/run/terms/*")),
        (("demo",), folder_with("everystep-demo-*/runtime/*/shadow.json")),
    ],
)
def test_temporary_folders_and_processes_go(
    runtime: Path, words: tuple[str, ...], begun: Callable[[Path], bool]
) -> None:
    place = runtime / "t"  # short: sockets lie below it
    place.mkdir()
    with on_terminal(*words, TMPDIR=str(place)) as terminal:
        deadline = time.monotonic() + 120
        while not begun(place):
            assert time.monotonic() < deadline and terminal.process.poll() is None, terminal.shown
            time.sleep(0.02)
        (made,) = place.glob("everystep-*")
        assert interrupt(terminal)[-1] == "interrupted"
    assert list(place.glob("everystep-*")) == []
    assert shadows_in(made / "runtime") == []


def test_a_pipe_gets_the_line_too(tmp_path: Path) -> None:
    """And a program that sends SIGINT gets the same code."""

    store_with_a_huge_file(tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-m", "everystep", "verify", str(tmp_path / "run"), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    descriptors = Path(f"/proc/{process.pid}/fd")
    deadline = time.monotonic() + 60
    while not any(_leads_to(fd, ondisk.SLOTS) for fd in descriptors.iterdir()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=60)
    assert (process.returncode, shown, said) == (130, b"", b"interrupted\n")


def _leads_to(fd: Path, name: str) -> bool:
    try:
        return fd.readlink().name == name
    except OSError:
        return False
