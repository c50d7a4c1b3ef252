"""Options: one conversion for arguments and environment, refusals that name what was set."""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import everystep
from everystep.environment import resolve, variable_of
from everystep.errors import OptionsError
from everystep.options import Checked, Keep, Options, Tuning

ROOT = Path(__file__).parents[2]
GROUPS: dict[str, type[Checked]] = {"": Options, "keep": Keep, "tuning": Tuning}


def kinds_of(kind: type[Checked]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


# every option by its path, as in "tuning.idle_exit"
KINDS = {
    f"{kind.prefix}{name}": of
    for kind in GROUPS.values()
    for name, of in kinds_of(kind).items()
    if name not in GROUPS
}
INTEGERS = [path for path, kind in KINDS.items() if int in (kind, *typing.get_args(kind))]
BOOLEANS = [path for path, kind in KINDS.items() if kind is bool]
NUMBERS = [path for path, kind in KINDS.items() if kind in (int, float)]


def variable(path: str) -> str:
    group, _, name = path.rpartition(".")
    return variable_of(GROUPS[group], name)


def value_of(options: Options, path: str) -> Any:
    return attrgetter(path)(options)


def makers(path: str) -> list[Callable[[Any], object]]:
    """The ways to give an option."""
    group, _, name = path.rpartition(".")
    kind = GROUPS[group]
    return [lambda v: kind(**{name: v})] + ([lambda v: resolve({name: v}, {})] if not group else [])


@pytest.mark.parametrize("path", BOOLEANS)
@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *((text, False) for text in ("False", "false", "FALSE", "0", "no", "off", " Off ")),
        *((text, True) for text in ("True", "true", "1", "yes", "on")),
    ],
)
def test_switches_in_the_environment(path: str, text: str, meant: bool) -> None:
    assert value_of(resolve({}, {variable(path): text}), path) is meant


@pytest.mark.parametrize(
    ("text", "enabled"), [("1", False), ("yes", False), ("0", True), ("False", True), ("", True)]
)
def test_disable(text: str, enabled: bool) -> None:
    assert resolve({}, {"EVERYSTEP_DISABLE": text}).enabled is enabled
    assert resolve({}, {"EVERYSTEP_DISABLE": text, "EVERYSTEP_ENABLED": "1"}).enabled is enabled
    assert resolve({"enabled": True}, {"EVERYSTEP_DISABLE": text}).enabled


@pytest.mark.parametrize(
    ("path", "text", "meant"),
    [
        ("durable_every", "50", 50),
        ("durable_every", "30s", "30s"),
        ("durable_log", "auto", "auto"),
        ("durable_log", "2", 2),
        ("overhead_budget_percent", "1", 1.0),
        ("keep.last", " 7 ", 7),
        ("every", "auto", "auto"),
        ("every", "10", 10),
        ("tuning.idle_exit", "5m", "5m"),
        ("tuning.store_quota", "2MB", "2MB"),
        ("override", "lr, weight_decay", ("lr", "weight_decay")),
        ("bucket", "", None),  # an empty variable says nothing
        ("keep.last", "", 3),
    ],
)  # fmt: skip
def test_text_becomes_the_options_type(path: str, text: str, meant: object) -> None:
    found = value_of(resolve({}, {variable(path): text}), path)
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
    with pytest.raises(OptionsError, match=rf"^{variable}={text}: option [\w.]+: "):
        resolve({}, {variable: text})


def test_names_of_variables_are_flat() -> None:
    assert variable("keep.last") == "EVERYSTEP_KEEP_LAST"
    assert variable("tuning.idle_exit") == "EVERYSTEP_IDLE_EXIT"
    assert len({variable(path) for path in KINDS}) == len(KINDS)


def test_a_field_that_is_given_beats_the_environment_and_others_take_it() -> None:
    """Also where what is given is the default."""
    said = {"EVERYSTEP_KEEP_LAST": "5", "EVERYSTEP_KEEP_DAILY": "7", "EVERYSTEP_IDLE_EXIT": "9s"}
    found = resolve({"keep": Keep(last=3), "tuning": Tuning(log=False)}, said)
    assert found.keep == Keep(last=3, every=0, hourly=0, daily=7, best="", slots=0)
    assert (found.tuning.log, found.tuning.idle_exit) == (False, "9s")
    assert resolve({}, said).keep.last == 5


def test_what_is_chosen_is_whole() -> None:
    """However it was made, and on its way to another process, which has an environment of its own."""
    for options in (Options(), Options(keep=Keep(last=9)), resolve({"tuning": Tuning()}, {})):
        assert all(value_of(options, path) is not msgspec.UNSET for path in KINDS)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=Options) == options


@pytest.mark.parametrize("path", KINDS)
def test_no_option_takes_what_is_not_its_type(path: str) -> None:
    """For every option, whatever will be added: text for numbers, True for counts, None, NaN, a list."""
    wrong: list[object] = [object(), [1], {}]
    wrong += [] if type(None) in typing.get_args(KINDS[path]) else [None]
    wrong += ["3", "x"] if path in NUMBERS else []
    wrong += [True] if path in INTEGERS or path in NUMBERS else []
    wrong += [float("nan"), 1.5] if path in INTEGERS else []
    wrong += [float("nan"), float("inf")] if KINDS[path] is float else []
    wrong += [1, "True"] if path in BOOLEANS else []
    for value in wrong:
        for make in makers(path):
            with pytest.raises(OptionsError, match=f"option {re.escape(path)}: .*expected"):
                make(value)


@pytest.mark.parametrize("name", ["keep", "tuning"])
@pytest.mark.parametrize("value", [None, 3, {}, {"last": 3}, object(), Options()])
def test_a_group_is_given_as_what_it_is(name: str, value: object) -> None:
    for make in (lambda: resolve({name: value}, {}), lambda: Options(**{name: value})):
        with pytest.raises(
            OptionsError, match=f"option {name}: .*expected everystep.{name.title()}"
        ):
            make()


def test_a_path_is_text() -> None:
    assert Tuning(arena_dir=Path("/somewhere")).arena_dir == "/somewhere"  # type: ignore[arg-type]


def parameters() -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(everystep.attach).parameters)
    for name in ("model", "optimizer", "run", "state"):
        del found[name]
    return found


def test_attach_lists_every_option_with_its_type_and_no_default_of_its_own() -> None:
    assert list(parameters()) == list(Options.__struct_fields__)
    hints, kinds = typing.get_type_hints(everystep.attach), kinds_of(Options)
    for name, parameter in parameters().items():
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default is msgspec.UNSET, f"{name}: the environment could not fill it in"
        assert _members(hints[name]) == _members(kinds[name]), name


def _members(kind: Any) -> set[Any]:
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return set(typing.get_args(kind)) if union else {kind}


@pytest.mark.parametrize(
    ("described", "kind"), [(everystep.attach, Options), (Keep, Keep), (Tuning, Tuning)]
)
def test_help_tells_every_option_with_its_default(described: Any, kind: type[Checked]) -> None:
    """In the order of the keywords, and nothing else."""
    told = defaults_told(inspect.getdoc(described) or "")
    assert list(told) == list(kind.__struct_fields__)
    for name, words in told.items():
        default = eval(words, {"Keep": Keep, "Tuning": Tuning})
        given = kind(**{name: default})
        whole = given if kind is Options else Options(**{kind.prefix.rstrip("."): given})
        assert whole == Options(), name


def defaults_told(text: str) -> dict[str, str]:
    """Of entries that begin at the margin and end with "Default: …", as Python writes it."""
    entries = re.findall(r"^(\w+)\s+(.*?)(?=^\S|\Z)", text, re.M | re.S)
    value = r'Default:\s+(".*?"|\(\)|\w+\(.*?\)|[\d.]+\d|\w+)'
    return {name: found[1] for name, words in entries if (found := re.search(value, words))}


def test_the_document_lists_every_option_with_its_default_and_variable() -> None:
    text = (ROOT / "docs" / "OPTIONS.md").read_text()
    rows = re.findall(r"^\| `([a-z_.]+)` \| `(\w+)` \| ([^|]+) \|", text, re.M)
    assert {path: name for path, name, _ in rows} == {path: variable(path) for path in KINDS}
    assert len(rows) == len(KINDS), "an option is listed twice"
    for path, _, default in rows:
        shown, meant = default.split(" ", 1)[0].strip("`"), value_of(Options(), path)
        assert shown == "none" if meant in (None, "", ()) else ast.literal_eval(shown) == meant, (
            path
        )
