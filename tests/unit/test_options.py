"""Options: one conversion for arguments and environment, refusals that name what was set."""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

import everystep
from everystep.errors import OptionsError
from everystep.options import Options, resolve

ROOT = Path(__file__).parents[2]
KINDS = typing.get_type_hints(Options)
INTEGERS = [name for name, kind in KINDS.items() if int in (kind, *typing.get_args(kind))]
BOOLEANS = [name for name, kind in KINDS.items() if kind is bool]
NUMBERS = [name for name, kind in KINDS.items() if kind in (int, float)]


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *((text, False) for text in ("False", "false", "FALSE", "0", "no", "off", " Off ")),
        *((text, True) for text in ("True", "true", "1", "yes", "on")),
    ],
)
def test_switches_in_the_environment(name: str, text: str, meant: bool) -> None:
    assert getattr(resolve({}, {f"EVERYSTEP_{name.upper()}": text}), name) is meant


@pytest.mark.parametrize(
    ("text", "enabled"), [("1", False), ("yes", False), ("0", True), ("False", True), ("", True)]
)
def test_disable(text: str, enabled: bool) -> None:
    assert resolve({}, {"EVERYSTEP_DISABLE": text}).enabled is enabled
    assert resolve({}, {"EVERYSTEP_DISABLE": text, "EVERYSTEP_ENABLED": "1"}).enabled is enabled
    assert resolve({"enabled": True}, {"EVERYSTEP_DISABLE": text}).enabled


@pytest.mark.parametrize(
    ("name", "text", "meant"),
    [
        ("durable_every", "50", 50),
        ("durable_every", "30s", "30s"),
        ("durable_log", "auto", "auto"),
        ("durable_log", "2", 2),
        ("overhead_budget_percent", "1", 1.0),
        ("keep_last", " 7 ", 7),
        ("override", "lr, weight_decay", ("lr", "weight_decay")),
        ("bucket", "", None),  # an empty variable says nothing
        ("keep_last", "", 3),
    ],
)  # fmt: skip
def test_text_becomes_the_options_type(name: str, text: str, meant: object) -> None:
    found = getattr(resolve({}, {f"EVERYSTEP_{name.upper()}": text}), name)
    assert found == meant and type(found) is type(meant)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("EVERYSTEP_IDLE_EXIT", "60"),
        ("EVERYSTEP_KEEP_LAST", "three"),
        ("EVERYSTEP_KEEP_LAST", "0"),
        ("EVERYSTEP_LOG", "maybe"),
        ("EVERYSTEP_ENABLED", "maybe"),
        ("EVERYSTEP_DISABLE", "maybe"),
        ("EVERYSTEP_ON_LAG", "panic"),
        ("EVERYSTEP_EVERY", "-5"),
        ("EVERYSTEP_DURABLE_LOG", "some"),
        ("EVERYSTEP_OVERHEAD_BUDGET_PERCENT", "nan"),
        ("EVERYSTEP_OVERHEAD_BUDGET_PERCENT", "x"),
    ],
)
def test_a_refused_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(OptionsError, match=rf"^{variable}={text}: option \w+: "):
        resolve({}, {variable: text})


@pytest.mark.parametrize("name", KINDS)
def test_no_option_takes_what_is_not_its_type(name: str) -> None:
    """For every option, whatever will be added: text for numbers, True for counts, None, NaN, a list."""
    wrong: list[object] = [object(), [1], {}]
    wrong += [] if type(None) in typing.get_args(KINDS[name]) else [None]
    wrong += ["3", "x"] if name in NUMBERS else []
    wrong += [True] if name in INTEGERS or name in NUMBERS else []
    wrong += [float("nan"), 1.5] if name in INTEGERS else []
    wrong += [float("nan"), float("inf")] if KINDS[name] is float else []
    wrong += [1, "True"] if name in BOOLEANS else []
    for value in wrong:
        for make in (lambda v: resolve({name: v}, {}), lambda v: Options(**{name: v})):
            with pytest.raises(OptionsError, match=f"option {name}: .*expected"):
                make(value)


def parameters() -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(everystep.attach).parameters)
    for name in ("model", "optimizer", "run", "state"):
        del found[name]
    return found


def test_attach_lists_every_option_with_its_type_and_no_default_of_its_own() -> None:
    assert list(parameters()) == [field.name for field in fields(Options)]
    hints = typing.get_type_hints(everystep.attach)
    for name, parameter in parameters().items():
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is msgspec.UNSET, f"{name}: the environment could not fill it in"
        assert _members(hints[name]) == _members(KINDS[name]) | {msgspec.UnsetType}, name
        assert re.search(rf"^    .*\b{name}\b", everystep.attach.__doc__ or "", re.M), name


def _members(kind: Any) -> set[Any]:
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return set(typing.get_args(kind)) if union else {kind}


def test_the_document_lists_every_option_with_its_default() -> None:
    table: dict[str, str] = {}
    for names, default in re.findall(
        r"^\| (`[a-z_`, ]+`) \| ([^|]+) \|", (ROOT / "docs" / "OPTIONS.md").read_text(), re.M
    ):
        table |= {name: default.strip("` ") for name in re.findall(r"\w+", names)}
    for field in fields(Options):
        shown = table.pop(field.name)
        assert (
            shown == "none"
            if field.default in (None, "", ())
            else ast.literal_eval(shown) == field.default
        )
    assert not table, "options that do not exist"
