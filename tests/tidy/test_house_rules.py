"""The rules of the house, as tests: each complaint says where, what, and what to do instead."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import everystep
from everystep.core.events import Event
from tidy import pictures

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
NATIVE = [p for p in (ROOT / "src/everystep/native").iterdir() if p.suffix in (".c", ".cu", ".h")]
FILE_LINES_MAX, FUNCTION_LINES_MAX, README_LINES_MAX = 400, 60, 150
TEST_LINES_MAX = 600  # a list of cases is long before it is tangled
BOUNDARIES = {"boundary.py", "process.py", "threads.py", "__main__.py"}


def test_public_names_are_frozen() -> None:
    names = [
        "EverystepError",
        "Keep",
        "Run",
        "StoredRun",
        "Tuning",
        "attach",
        "compare_ranks",
        "compress",
        "data",
        "open_run",
        "restore",
    ]
    assert everystep.__all__ == names, "a public name was added or lost: only on purpose"
    for name in names:
        assert getattr(everystep, name) is not None
    assert set(names) <= set(dir(everystep))


def test_options_are_frozen() -> None:
    """Typed keywords, and nothing else."""
    keywords = [
        "run",
        "state",
        "resume",
        "override",
        "every",
        "durable_every",
        "durable_log",
        "on_lag",
        "on_failure",
        "overhead_budget_percent",
        "keep",
        "bucket",
        "enabled",
        "tuning",
    ]
    assert list(inspect.signature(everystep.attach).parameters) == ["model", "optimizer", *keywords]
    keep = ["last", "every", "hourly", "daily", "best", "slots"]
    assert list(everystep.Keep.__struct_fields__) == keep
    assert list(everystep.Tuning.__struct_fields__) == [
        "log",
        "fingerprint_every",
        "residuals",
        "mtbf",
        "idle_exit",
        "arena_dir",
        "store_quota",
        "disk_bytes_per_second",
        "disk_bytes_per_day",
        "bucket_bytes_per_second",
    ]


def test_files_stay_small() -> None:
    limits = dict.fromkeys((*SOURCES, *NATIVE), FILE_LINES_MAX)
    limits |= dict.fromkeys((ROOT / "tests").rglob("*.py"), TEST_LINES_MAX)
    lines = {path: path.read_text().count("\n") for path in limits}
    long = [f"{p}:1: {n} lines, split the file" for p, n in lines.items() if n > limits[p]]
    assert not long, "\n".join(long)


def test_functions_stay_small() -> None:
    complaints = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno
                if length > FUNCTION_LINES_MAX:
                    complaints.append(f"{path}:{node.lineno}: {length} lines, split the function")
    assert not complaints, "\n".join(complaints)


def test_the_readme_stays_short() -> None:
    lines = (ROOT / "README.md").read_text().count("\n")
    assert lines <= README_LINES_MAX, "move something to a document in docs/"


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(p) for p in SOURCES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert [p for p in silent if not p.endswith("everystep/__main__.py")] == []


def test_broad_excepts_stand_at_the_boundaries_only() -> None:
    found = [
        f"{path}:{number}: except Exception, let it travel to the boundary"
        for path in SOURCES
        if path.name not in BOUNDARIES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s*except( (Exception|BaseException).*)?:", line)
        and "raise" not in "".join(path.read_text().splitlines()[number : number + 3])
    ]
    assert not found, "\n".join(found)


def test_the_role_of_a_shadow_changes_in_one_place() -> None:
    """In the method that asks the table of core/roles.py, and logs the transition."""
    places = []
    for path in SOURCES:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                stored = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
                if any(n.attr == "role" and isinstance(n.ctx, ast.Store) for n in stored):
                    places.append((path.name, function.name))
    assert places == [("succession.py", "__init__"), ("succession.py", "happens")]


def test_phases_change_in_one_place() -> None:
    """What assigns a phase elsewhere goes around the table of `core/phases.py`."""
    pattern = re.compile(r"\.phase\b\s*(?:=[^=]|,.*=[^=])")
    found = [
        (path.name, line.strip())
        for path in SOURCES
        for line in path.read_text().splitlines()
        if pattern.search(line)
    ]
    assert found == [
        ("record.py", "self.phase = Phase.OPENING"),
        ("record.py", "before, self.phase = self.phase, advance(self.phase, cause)"),
    ]


def test_no_pickle() -> None:
    users = [p for p in SOURCES if re.search(r"\b(import pickle|torch\.load)\b", p.read_text())]
    assert users == []


def test_reading_a_run_does_not_import_torch() -> None:
    code = (
        "import sys, everystep, everystep.cli.app, everystep.shadow.process; everystep.open_run; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_links_in_documents_lead_somewhere() -> None:
    broken = []
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            if not (document.parent / target).exists():
                broken.append(f"{document.name}: {target}")
    assert not broken, broken


def test_source_files_named_in_documents_exist() -> None:
    """Named from the root of the repository or of the package, in `code`."""
    missing = []
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for name in re.findall(r"`([\w/]+\.(?:py|c|h|cu))`", document.read_text()):
            if not any((place / name).is_file() for place in (ROOT, ROOT / "src" / "everystep")):
                missing.append(f"{document.name}: {name}")
    assert not missing, missing


def test_the_table_of_rooms_has_the_levels_of_the_contract() -> None:
    """From the top to the ground; in which order those of one level stand is free."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    levels = [set(level.split(" | ")) for level in contracts["contracts"][0]["layers"]]
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Rooms\n")[2]
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    rooms = [room for row in rows for room in re.findall(r"`(\w+)(?:/|\.py)`", row)]
    told = [{rooms.pop(0) for _ in level if rooms} for level in levels]
    assert told == levels
    assert not rooms


def test_the_document_of_the_format_lists_every_event() -> None:
    text = (ROOT / "docs" / "FORMAT.md").read_text().partition("\n## Events\n")[2]
    told = dict(re.findall(r"^\| (\w+) \| (.+) \|$", text.partition("\n## ")[0], re.MULTILINE))
    known = {e.__struct_config__.tag: ", ".join(e.__struct_fields__) for e in get_args(Event)}
    assert {"event": "fields", **known} == told


def test_the_pictures_show_the_source() -> None:
    drawn = pictures.DOCUMENT.read_text()
    assert drawn == pictures.document(), "docs/STATES.md is out of date: make fix"


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("document", ["docs/GUARANTEES.md", "docs/PAPERS.md", "SECURITY.md"])
def test_tests_that_attack_a_promise_exist(document: str) -> None:
    named = NAMED_TEST.findall((ROOT / document).read_text())
    assert named
    for path, function in named:
        assert (ROOT / path).is_file(), path
        if function:
            found = re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE)
            assert found, f"{path}::{function}"


def promises(text: str) -> list[str]:
    """Rows of tables without their heads, and points of lists with the lines that go on with them."""
    kept, rows = [], re.split(r"\n(?=\||- |\n|#)", text)
    for row, following in zip(rows, [*rows[1:], ""], strict=True):
        rule, head = row.strip().startswith("|---"), following.strip().startswith("|---")
        if row.strip().startswith(("|", "- ")) and not rule and not head:
            kept.append(row.strip())
    return kept


def test_every_line_about_security_names_its_test() -> None:
    """File and function: a file alone may attack something else."""
    lines = promises((ROOT / "SECURITY.md").read_text())
    assert len(lines) > 20
    bare = [line for line in lines if not any(function for _, function in NAMED_TEST.findall(line))]
    assert not bare, "\n".join(bare)


def test_every_guarantee_names_a_file_of_tests() -> None:
    table = (ROOT / "docs" / "GUARANTEES.md").read_text().partition("\n## ")[0]
    lines = promises(table)
    assert len(lines) > 40
    bare = [line for line in lines if not NAMED_TEST.search(line.split("|")[-2])]
    assert not bare, "\n".join(bare)
