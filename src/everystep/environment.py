"""Options from three sources: what is given, then the variables EVERYSTEP_*, then the defaults."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import msgspec

from everystep.errors import OptionsError
from everystep.option_values import checked
from everystep.options import Checked, Group, Keep, Options, Tuning
from everystep.text import redacted, switch

_GROUPS: dict[str, type[Group]] = {"keep": Keep, "tuning": Tuning}


def variable_of(kind: type[Checked], name: str) -> str:
    """Names are flat: what `Keep` calls `last` is EVERYSTEP_KEEP_LAST."""
    return f"EVERYSTEP_{'KEEP_' if kind is Keep else ''}{name.upper()}"


def resolve(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """What is given must have the option's type; a variable is text and is read as that type."""
    known = Options.__struct_fields__
    if unknown := sorted(set(given) - set(known)):
        raise OptionsError(
            f"attach: unknown option {unknown[0]!r}",
            hint=f"known options: {', '.join(sorted(known))}",
        )
    values = {**_said(Options, environment), **given}
    if "enabled" not in given and _disabled(environment):
        values["enabled"] = False
    for name, kind in _GROUPS.items():
        group, said = values.get(name, kind()), kind(**_said(kind, environment))
        # what is no group is refused with all other values, below
        values[name] = group.over(said) if isinstance(group, kind) else group
    return Options(**values)


def _said(kind: type[Checked], environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        field.name: _read(kind.prefix + field.name, field.type, variable, environment[variable])
        for field in msgspec.structs.fields(kind)
        if field.name not in _GROUPS
        and environment.get(variable := variable_of(kind, field.name))  # an empty one says nothing
    }


def _disabled(environment: Mapping[str, str]) -> bool:
    text = environment.get(name := "EVERYSTEP_DISABLE")
    return bool(text and _read("enabled", bool, name, text))


def _read(option: str, kind: Any, variable: str, text: str) -> Any:
    value: Any = text.strip()
    if kind is bool:
        known = switch(value)
        value = value if known is None else known
    elif get_origin(kind) is tuple:
        value = [part.strip() for part in value.split(",")]
    # msgspec leaves text alone where text is allowed: a number is tried first
    for tried in (int, kind) if int in get_args(kind) else (kind,):
        with contextlib.suppress(msgspec.ValidationError):
            value = msgspec.convert(value, tried, strict=False)
            break
    try:
        return checked(option, kind, value)
    except OptionsError as error:
        raise OptionsError(
            f"{variable}={redacted(text)}: {error.args[0]}", hint=error.hint
        ) from None
