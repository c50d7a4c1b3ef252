"""Nothing is called by a word in the column *not* of docs/GLOSSARY.md: no name, message or sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from everystep.cli.app import app

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "GLOSSARY.md"
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
CODE = [p for p in ROOT.glob("src/everystep/**/*") if p.suffix in {".py", ".c", ".h", ".cu"}]
EXAMPLES = list(ROOT.glob("examples/*.py"))
DATA_EPOCH = re.compile(r"\b(?:data|batches|set|last) epochs?\b|\*Epoch\*", re.I)
MODULE_OF_THE_DATA = "src/everystep/batches.py"  # what it calls an epoch is the data's


def avoided(glossary: str) -> dict[str, str]:
    """By word in the column *not*: the word to use instead."""
    found = {}
    for line in glossary.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and not cells[0].startswith("---") and cells[2] != "not":
            found |= {word: cells[0] for word in re.split(r"[,;] ?", cells[2]) if word}
    return found


def prose(text: str) -> str:
    """Names as words: of `snake_case`, CamelCase and hyphens. No line is added or lost."""
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return re.sub(r"[-_.](?=\w)", " ", text)


def pattern(word: str) -> re.Pattern[str]:
    """Any case and regular inflection; its parts may stand on two lines of a comment."""
    *before, last = re.split(r"[ -]", word)
    stem, ending = (
        (last[:-1], "(?:e|es|ed|ing)") if last.endswith("e") else (last, "(?:s|es|ed|ing)?")
    )
    between = r"[\s#*\"']+"
    return re.compile(rf"(?<![a-z]){between.join([*before, stem])}{ending}(?![a-z])", re.I)


def complaints(where: str, text: str, words: dict[str, str]) -> list[str]:
    text, found = prose(text), []
    for word, instead in words.items():
        searched = text
        if word == "epoch":
            searched = "" if where == MODULE_OF_THE_DATA else DATA_EPOCH.sub("", text)
        for match in pattern(word).finditer(searched):
            line = searched.count("\n", 0, match.start()) + 1
            said = " ".join(match[0].split())
            found.append(f"{where}:{line}: {said!r}, use {instead!r} (docs/GLOSSARY.md)")
    return found


def test_names_messages_comments_and_documents_keep_to_the_glossary() -> None:
    words = avoided(GLOSSARY.read_text())
    assert len(words) > 30
    found = []
    for path in [*CODE, *EXAMPLES, *DOCUMENTS]:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if path == GLOSSARY:  # without the column itself
            text = re.sub(r"\|[^|\n]*\|$", "|", text, flags=re.MULTILINE)
        found += complaints(name, name, words) + complaints(name, text, words)
    assert not found, "\n" + "\n".join(found)


def test_help_texts_keep_to_the_glossary() -> None:
    """As they are shown: some are put together from parts."""
    words, seen = avoided(GLOSSARY.read_text()), set()
    commands = [("everystep", typer.main.get_command(app))]
    for path, command in commands:
        commands += [(f"{path} {n}", c) for n, c in getattr(command, "commands", {}).items()]
        options = (getattr(parameter, "help", "") or "" for parameter in command.params)
        assert not complaints(path, "\n".join([command.help or "", *options]), words)
        seen.add(path)
    assert "everystep rewind" in seen


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\nself.records_let_go += 1", "a.py:2: 'let go', use 'drop' (docs/GLOSSARY.md)"),
        ("# it let\n# go of it", "a.py:1: 'let # go', use 'drop' (docs/GLOSSARY.md)"),
        ("class StepRedo:", "a.py:1: 'Redo', use 'replay' (docs/GLOSSARY.md)"),
        ('why = "reverts it"', "a.py:1: 'reverts', use 'rewind' (docs/GLOSSARY.md)"),
        ("finalising", "a.py:1: 'finalising', use 'commit' (docs/GLOSSARY.md)"),
        ("of epoch 3", "a.py:1: 'epoch', use 'term' (docs/GLOSSARY.md)"),
        ("data epoch 3, batches.epoch, sampler.set_epoch(1)", ""),
        ("letters, gone, predominant, walk", ""),
    ],
)
def test_a_word_is_found_in_names_and_inflections(text: str, complaint: str) -> None:
    table = """
| word | meaning | not |
|---|---|---|
| drop | to give up | let go, WAL |
| replay | to apply a record again | redo |
| rewind | to go back | rollback, revert |
| commit | to make bytes count | finalise |
| term | one writer | epoch |
"""
    assert complaints("a.py", text, avoided(table)) == ([complaint] if complaint else [])
