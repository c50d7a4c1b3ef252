"""The status document: typed, documented, the same in documents of real runs; and what people see of it."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cli.terminal import on_terminal
from typer.testing import CliRunner

import everystep
from everystep.cli import status as command_module
from everystep.cli.app import app
from everystep.core.status import (
    BucketStatus,
    MeasuredStatus,
    PlanStatus,
    Status,
    read_status,
)
from everystep.lane.control import Answer
from everystep.tune.measured import Measured
from everystep.tune.model import Plan

DOCUMENT = Path(__file__).parents[2] / "docs" / "STATUS.md"
LINES_MAX = 12
UNITS = {
    r"bytes_per_second$": "bytes/s",
    r"bytes_per_day$": "bytes/day",
    r"bytes($|_)": "bytes",
    r"seconds($|_)": "s",
    r"percent$": "%",
    r"^days_": "days",
    r"steps$": "steps",
    r"step$": "step",
}


def tables() -> dict[str, list[list[str]]]:
    """Rows of every table, by the heading before it; the first one has none."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            cells[:2] = [cell.strip("`") for cell in cells[:2]]
            found.setdefault(heading, []).append(cells)
    return found


def told(kind: Any) -> str:
    """A type as the tables write it; None is said once for all of them."""
    if isinstance(kind, types.UnionType):
        (kind,) = [part for part in typing.get_args(kind) if part is not type(None)]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "object"
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def structs() -> dict[str, type[msgspec.Struct]]:
    """The document itself, and every struct inside of it by the field that holds it."""
    found: dict[str, type[msgspec.Struct]] = {"": Status}
    for kind in list(found.values()):
        waiting = [kind]
        while waiting:
            for field in msgspec.structs.fields(waiting.pop(0)):
                for part in typing.get_args(field.type):
                    if isinstance(part, type) and issubclass(part, msgspec.Struct):
                        found[field.name] = part
                        waiting.append(part)
    return found


def test_the_tables_are_the_structs() -> None:
    documented = tables()
    assert documented.keys() == structs().keys()
    for heading, kind in structs().items():
        rows = documented[heading]
        fields = msgspec.structs.fields(kind)
        assert [row[0] for row in rows] == [field.name for field in fields], heading
        assert [row[1] for row in rows] == [told(field.type) for field in fields], heading
        for name, type_told, unit, *_, meaning in rows:
            assert meaning and not meaning.endswith("."), name
            expected = next((u for pattern, u in UNITS.items() if re.search(pattern, name)), None)
            if type_told in ("int", "float"):
                assert unit == (expected or unit) != "", name


def told_by(*sources: str) -> set[str]:
    return {row[0] for row in tables()[""] if row[3] in sources}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one run: from the trainer, from the command beside it, and when nobody is there any more."""
    folder = tmp_path_factory.mktemp("status")
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("EVERYSTEP_RUNTIME_DIR", str(tmp_path_factory.mktemp("es")))
        auto: dict[str, Any] = {"durable_every": "auto", "durable_log": "auto"}
        url = f"file://{folder}/bucket"
        model, optimizer = small()
        with everystep.attach(
            model, optimizer, run=folder / "run", bucket=url, on_failure="raise", **auto
        ) as run:
            for _ in run.steps(3):
                turn(model, optimizer)
            run.flush()
            found["trainer"] = run.status()
            found["shadow"] = asked(folder / "run")
            found["lines"] = shown(folder / "run")
        found["store"] = asked(folder / "run")
        found["url"] = asked(url)
    model, optimizer = small()
    with everystep.attach(model, optimizer, run=folder / "none", enabled=False) as run:
        found["disabled"] = run.status()
    return found


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.Adam(model.parameters())


def turn(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()


def asked(run: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["status", str(run), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stdout
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def shown(run: object, *words: str) -> list[str]:
    done = CliRunner().invoke(app, ["status", str(run), *words], catch_exceptions=False)
    return done.stdout.splitlines()


def test_documents_of_real_runs_are_as_documented(documents: dict[str, Any]) -> None:
    """An addition fails here until core/status.py and docs/STATUS.md have it."""
    assert documents["trainer"].keys() == told_by("store", "shadow", "trainer")
    assert documents["shadow"].keys() == told_by("store", "shadow")
    assert documents["store"].keys() == told_by("store")
    assert documents["url"].keys() == told_by("store") | {"bucket"}
    assert documents["disabled"].keys() == told_by("disabled") | {"summary"}
    kinds = structs()
    for name in ("trainer", "shadow", "store", "url", "disabled"):
        document = documents[name]
        msgspec.convert(
            document, Status, strict=True
        )  # every value has the type that is documented
        order = [n for n in Status.__struct_fields__ if n in document]
        assert list(document) == order, f"{name}: in the order of the fields"
    for part in ("bucket", "disk_forecast", "measured", "tuner"):
        fields = set(kinds[part].__struct_fields__)
        assert documents["trainer"][part].keys() == fields, part
    assert {f.name for f in dataclasses.fields(Measured)} == set(MeasuredStatus.__struct_fields__)
    assert {f.name for f in dataclasses.fields(Plan)} == set(PlanStatus.__struct_fields__)


def test_what_a_person_needs_fits_a_dozen_lines(documents: dict[str, Any]) -> None:
    lines, status = documents["lines"], documents["shadow"]
    assert len(lines) <= LINES_MAX
    labels = [line.split()[0] for line in lines[1:]]
    assert labels == ["run", "shadow", "store", "bucket", "health", "rates", "disk", "pids"]
    assert lines[0].startswith("process dies → step 3; host dies → step 3")
    assert f"trainer {status['trainer_pid']}, shadow {status['pid']}" in lines[-1]


TROUBLED = """
import json, sys
from everystep.cli import status
from everystep.cli.app import app
from everystep.lane.control import Answer
card = type("Card", (), {"control": "ipc:///nowhere", "pid": 1, "run": ""})
told = json.loads(sys.argv.pop())
status.shadow_of = lambda run, folder: card
status.ask = lambda *a, **k: Answer(status=told)
app()
"""


def rows_on(columns: int, run: Path, told: dict[str, Any], *more: str) -> list[str]:
    """What a person has before their eyes: a line that is too long for the terminal takes several rows."""
    words = ("status", run, *more, json.dumps(told))
    with on_terminal(*words, columns=columns, program=("-c", TROUBLED)) as terminal:
        terminal.finish()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.shown).replace("\r", "").splitlines()
    return [line[i : i + columns] for line in lines for i in range(0, max(len(line), 1), columns)]


@pytest.mark.parametrize("warns", [False, True])
def test_a_run_in_trouble_fits_a_terminal(
    documents: dict[str, Any], tmp_path: Path, warns: bool
) -> None:
    run = f"/data/runs/{'run-' * 14}"
    problem = "; ".join(f"write {run}/file-{i}: no space left" for i in range(20))[:600]
    ahead = "the disk is full in 20.5 hours: the rules let 340.2 GB stay, there is room for 2 GB; "
    told = documents["shadow"] | {
        "run": run,
        "health": "degraded",
        "problem": problem,
        "shadow_step": 1234567,
        "durable_step": 1230000,
        "durable_age_seconds": 4000.0,
        "durable_bytes_per_day": 3e12,
        "bucket": {"url": f"s3://bucket/{'prefix/' * 8}", "step": 1200000, "behind_bytes": 2**31},
        "disk_forecast": documents["shadow"]["disk_forecast"] | {"warning": 2 * ahead * warns},
    }
    rows = rows_on(80, tmp_path, told)
    assert len(rows) <= LINES_MAX, "\n".join(rows)
    shown = "".join(rows)
    assert problem[:120] in shown and problem not in shown and "… (--verbose)" in shown
    assert run in shown, "names are never cut"
    assert problem in "".join(rows_on(1000, tmp_path, told, "--verbose"))


def test_a_document_of_another_version_still_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = {
        "shadow_step": 7,
        "outlives_trainer": True,
        "durable_step": 5,
        "health": "ok",
        "pid": "a name",
        "ring_waiting": {"slots": 3},
        "quorum": {"hosts": 3},
        "tuner": {"plan": "by vote"},
        "bucket": {"url": "s3://b", "step": 4, "zone": "x"},
    }
    card = type("Card", (), {"control": "ipc:///nowhere", "pid": 1, "run": ""})
    monkeypatch.setattr(command_module, "shadow_of", lambda run, folder: card)
    monkeypatch.setattr(command_module, "ask", lambda *a, **k: Answer(status=strange))
    lines = shown(tmp_path)
    assert "process dies → step 7" in lines[0] and len(lines) <= LINES_MAX
    assert any(line.split()[:3] == ["store", "step", "5,"] for line in lines)
    assert any('"hosts":3' in line for line in shown(tmp_path, "--verbose"))
    assert asked(tmp_path)["quorum"] == {"hosts": 3}
    found = read_status(strange)
    assert found.pid is None and found.tuner is None and found.shadow_step == 7
    assert found.bucket == BucketStatus(url="s3://b", step=4)
