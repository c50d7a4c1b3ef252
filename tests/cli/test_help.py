"""Help of every command, option and argument: imperative sentences, with units and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from everystep.cli.app import app

VERBS = re.findall(
    r"\w+",
    """
    Call Choose Compare Compress Discard Draw End Examine Find Give Go Have Keep Kill Leave Let List Log Look
    Make Measure Name Pin Plan Print Prune Read Remove Replay Show Step Stop Take Train Use Wait Write
    """,
)
UNITS = re.findall(
    r"\w+",
    """
    GB bases bytes days elements hours parameters percent seconds sequences share slots step steps threads
    times windows
    """,
)
COUNTS = {"--seed"}  # numbers that measure nothing
ALL_HAVE = {"--json", "--output", "-o"}


def commands(group: Any = None, path: str = "everystep") -> Iterator[tuple[str, Any]]:
    """Every command and group, by the words that call it."""
    group = group or typer.main.get_command(app)
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{path} {name}")


def parameters() -> Iterator[tuple[str, Any]]:
    for path, command in commands():
        for parameter in command.params:
            yield f"{path} {parameter.opts[0]}", parameter


def complaint(help_text: str | None) -> str:
    if not help_text:
        return "no help"
    if help_text.split()[0] not in VERBS:
        return f"{help_text.split()[0]!r} is no verb in the imperative (or new: add it to VERBS)"
    return "" if help_text.endswith(".") else "no period at the end"


def test_every_help_is_an_imperative_sentence() -> None:
    texts = {path: command.help for path, command in commands()}
    texts |= {path: parameter.help for path, parameter in parameters()}
    complaints = {path: complaint(text) for path, text in texts.items()}
    assert len(complaints) > 100, "the walk over the commands has missed most of them"
    assert {path: found for path, found in complaints.items() if found} == {}


def test_the_document_lists_every_command() -> None:
    text = (Path(__file__).parents[2] / "docs" / "COMMANDS.md").read_text()
    assert [path for path, _ in commands() if path not in text] == []


def test_numbers_have_a_unit_and_a_default() -> None:
    seen, wrong = 0, []
    for path, parameter in parameters():
        if parameter.type_descriptor.annotation not in (int, float) or not parameter.help:
            continue
        seen += 1
        words = set(re.findall(r"\w+", parameter.help))
        if not words & {*UNITS} and parameter.opts[0] not in COUNTS:
            wrong.append(f"{path}: no unit in {parameter.help!r}")
        told = parameter.default is not None or "Default: " in parameter.help
        if not parameter.required and not told:
            wrong.append(f"{path}: no default")
    assert seen > 20 and not wrong, "\n".join(wrong)


def test_an_option_without_a_value_says_what_holds_then() -> None:
    """A choice that is not made has an effect too: one that is not a flag tells it."""
    silent = [
        path
        for path, parameter in parameters()
        if not parameter.required
        and parameter.default in (None, "")
        and "Default: " not in parameter.help
        and "as well" not in parameter.help  # nothing is done without it
    ]
    assert silent == []


def test_all_commands_have_the_same_two_options() -> None:
    for path, command in commands():
        options = {name for parameter in command.params for name in parameter.opts}
        if not hasattr(command, "commands"):
            assert options >= ALL_HAVE, path
