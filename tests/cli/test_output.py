"""What reaches the terminal: names as they are, none of them cut, and none that the terminal would obey."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli.terminal import on_terminal
from typer.testing import CliRunner

import everystep
from everystep.cli import output
from everystep.cli.app import app

EVIL = "[/red]\x1b[2J\x1b]0;mine\x07[bold]\r\u202e\x7f\x9b2J\U000e0001"
# the same, escaped as Python does
SHOWN = "[/red]\\x1b[2J\\x1b]0;mine\\x07[bold]\\r\\u202e\\x7f\\x9b2J\\U000e0001"
LONG = ["a" * 70 + "_query", "a" * 70 + "_value"]
TAGS = ["t" * 60 + "_old", "t" * 60 + "_new"]
OWN_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[mhlKGA]")  # colours, and what a progress bar needs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases in a folder, with tensors, that nobody should have named so."""
    path = tmp_path_factory.mktemp("output") / f"run {EVIL}"
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("EVERYSTEP_RUNTIME_DIR", str(tmp_path_factory.mktemp("es")))
        weights = {name: torch.nn.Parameter(torch.ones(3, 2)) for name in (EVIL, *LONG)}
        model = torch.nn.ParameterDict(weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with everystep.attach(model, optimizer, run=path, on_failure="raise") as training:
            for _ in training.steps(2):
                sum(p.sum() for p in model.parameters()).backward()
                optimizer.step()
                training.flush()
            for tag in TAGS:
                training.tag(tag)
    return path


def words(verb: str, run: Path) -> list[str]:
    more = {"diff": ["1", "2"], "prune": ["--dry-run"], "rewind": ["2"], "tag": ["77", EVIL]}
    return [verb, str(run), *more.get(verb, [])]


VERBS = ["status", "ls", "inspect", "verify", "diff", "prune", "bisect", "tag", "rewind"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_document_is_not_obeyed_either(run: Path, verb: str, tmp_path: Path) -> None:
    """JSON allows what lies above 31 in a string as it is; a terminal obeys some of it."""
    file = tmp_path / "document.json"
    command = [*words(verb, run), "--json", "-o", str(file)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    for written in (done.stdout, file.read_text() if file.exists() else done.stdout):
        assert not re.search(r"[^\x20-\x7e\n\u2192]", written), written
        document = json.loads(written)
    if verb in ("status", "ls", "inspect", "diff", "prune"):  # an error has words
        assert any(EVIL in word for word in strings(document)), "what is read is the name itself"


def strings(value: object) -> list[str]:
    if isinstance(value, dict):
        return [*value, *strings(list(value.values()))]
    if isinstance(value, list):
        return [word for inner in value for word in strings(inner)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("verb", VERBS)
def test_names_are_shown_and_not_obeyed(run: Path, verb: str) -> None:
    done = CliRunner().invoke(app, words(verb, run), catch_exceptions=False)
    everything = done.stdout + done.stderr
    assert not re.search(r"[^\x20-\x7e\n\u2192]", everything), everything
    if verb in ("status", "ls", "inspect", "diff", "prune", "tag"):
        assert SHOWN in everything


def test_a_progress_bar_and_colours_are_all_that_a_terminal_gets(run: Path) -> None:
    for verb in ("verify", "inspect", "tag"):
        with on_terminal(*words(verb, run)) as terminal:
            terminal.finish()
        left = OWN_SEQUENCES.sub("", terminal.shown)
        assert "\x1b" not in left and "\x07" not in left and "\u202e" not in left, left


def test_a_path_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are escaped, in words and in JSON."""
    odd = bytes(tmp_path) + b"/\xff"
    for more in ([], ["--json"]):
        command = [sys.executable.encode(), b"-m", b"everystep", b"ls", odd]
        done = subprocess.run([*command, *(m.encode() for m in more)], capture_output=True)
        assert done.returncode == 2 and b"Traceback" not in done.stderr, done.stderr
        assert b"\\udcff" in done.stdout + done.stderr
    assert "\\udcff" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("verb", ["inspect", "diff"])
def test_names_are_never_cut(run: Path, verb: str) -> None:
    """Not in a pipe, not in a terminal that is narrower than they are: they would look alike."""
    piped = CliRunner().invoke(app, words(verb, run), catch_exceptions=False).stdout
    rows = [line for line in piped.splitlines() if line.startswith("aaa")]
    assert [row.split()[0] for row in rows] == LONG
    assert all(row.split()[-1] for row in rows) and "…" not in piped
    for columns in (40, 90):
        with on_terminal(*words(verb, run), columns=columns) as terminal:
            assert terminal.finish() == 0
        assert all(name in terminal.shown for name in LONG) and "…" not in terminal.shown


@pytest.mark.parametrize("verb", ["ls", "prune"])
def test_in_a_pipe_one_row_is_one_line(run: Path, verb: str) -> None:
    done = CliRunner().invoke(app, words(verb, run), catch_exceptions=False)
    rows = [line for line in done.stdout.splitlines() if re.match(r"\d+ +\d+ +\d{4}-", line)]
    assert [int(row.split()[0]) for row in rows] == [2, 1, 0]
    told = TAGS if verb == "ls" else [f"tag {tag}" for tag in TAGS]
    assert all(words in rows[0] for words in told), rows[0]


def test_the_document_goes_to_a_file_too(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["ls", str(run), "-o", str(file)], catch_exceptions=False)
    assert done.exit_code == 0 and "term" in done.stdout
    both = CliRunner().invoke(app, ["ls", str(run), "--json"], catch_exceptions=False)
    assert json.loads(file.read_bytes()) == json.loads(both.stdout)


@pytest.mark.parametrize("make", [lambda p: p / "absent" / "x.json", lambda p: p])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, make: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = []
    commands = output.Commands()

    @commands.command()
    def work() -> output.Reply:
        worked.append(True)
        return output.Reply({}, list)

    done = CliRunner().invoke(commands, ["-o", str(make(tmp_path))], catch_exceptions=False)
    assert done.exit_code == 2 and "cannot be written" in done.stderr and not worked
