"""Every command line that a document shows: it is understood, and what is quick is done on a small run."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from cli.test_help import commands
from typer.testing import CliRunner

import everystep
from everystep.cli.app import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md", "Makefile"),
    *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "FORMAT.md"),
)
PLACEHOLDERS = {"STEP": "2", "A": "1", "B": "2", "NAME": "good", "N": "4"}


def lines() -> Iterator[str]:
    """From blocks that are indented, and from `code`; variants are lines of their own."""
    for document in DOCUMENTS:
        text = (ROOT / document).read_text().replace("$(BIN)/", "")
        shown = re.findall(r"^(?:    |\t)(everystep .*?)(?:  .*)?$", text, re.MULTILINE)
        shown += re.findall(r"`(?:\w+=\w+ )?(everystep [^`…]*)`", text)
        for line in shown:
            yield from variants(line)


def variants(line: str) -> Iterator[str]:
    """`a | b | c` as three lines; `[--option]` with and without it."""
    if " | " in line:
        first, *others = line.split(" | ")
        head = first.rpartition(" ")[0]
        for line in (first, *(f"{head} {other}" for other in others)):
            yield from variants(line)
    elif found := re.search(r" \[([^\]]*)\]", line):
        for inner in ("", f" {found[1]}"):
            yield from variants(line.replace(found[0], inner))
    else:
        yield line


SHOWN = sorted(set(lines()))


def test_every_command_is_shown() -> None:
    shown = {line.split()[1] for line in SHOWN}
    known = {name.split()[1] for name, _ in commands() if " " in name}
    assert shown == known, "a command that is not shown, or one that does not exist"


def test_every_line_is_understood(tmp_path: Path) -> None:
    known = PLACEHOLDERS | {"FILE": str(tmp_path / "x"), "PNG": str(tmp_path / "x.png")}
    assert len(SHOWN) > 30
    for line in SHOWN:
        words = [known.get(word, word) for word in shlex.split(line)[1:]]
        command: Any = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not hasattr(command, "commands"), f"no such command: {line}"
        if words:  # else it is only named
            command.make_context(line, words)  # raises what a user would be told


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with bases of a few steps."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("EVERYSTEP_RUNTIME_DIR", str(tmp_path_factory.mktemp("es")))
        run = tmp_path_factory.mktemp("readme") / "run"
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters())
        with everystep.attach(model, optimizer, run=run, on_failure="raise") as training:
            for _ in training.steps(3):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
                training.flush()
    return run


@pytest.mark.parametrize("line", [s for s in SHOWN if re.match(r"everystep \w+ RUN", s)])
def test_a_line_does_what_it_says(
    line: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    known = {**PLACEHOLDERS, "RUN": str(tmp_path / "run")}
    words = [known.get(word, word) for word in shlex.split(line)[1:]]
    runner = CliRunner()
    if "--remove" in words:
        assert runner.invoke(app, [w for w in words if w != "--remove"]).exit_code == 0
    asked = words[0] == "rewind" and "--yes" not in words  # nobody sits at a test
    tuned = ["--step-time", "0.2s"] if words[0] == "tune" else []  # and nobody trains
    done = runner.invoke(app, [*words, *tuned], catch_exceptions=False)
    assert done.exit_code == (2 if asked else 0), done.output
