"""What the value of an option may be, and what its text means."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from everystep.errors import OptionsError
from everystep.text import is_text, redacted

AUTO = "auto"
_UNITS_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BEST = re.compile(r"([1-9]\d*)\s+(lowest|highest)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i?))?b?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")


def duration_seconds(name: str, text: str) -> float:
    """'90s', '10m', '2h', '1d' in seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise OptionsError(
            f"option {name}: {text!r} is not a duration", hint='write "30s", "10m" or "2h"'
        )
    return float(match[1]) * _UNITS_SECONDS[match[2]]


def size_bytes(name: str, value: str | int) -> int:
    """A number of bytes, or '200GB', '1.5 TiB', '64k' as one: B, kB, MB… are powers of 1000, KiB… of 1024."""
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is not None:
        base = 1024 if match[3] == "i" else 1000
        return int(float(match[1]) * base ** " kmgtp".index(match[2] or " "))
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionsError(
            f"option {name}: {value!r} is not a number of bytes", hint='write "200GB", or bytes'
        )
    return value


def best_of(text: str) -> tuple[int, bool]:
    """'3 lowest' as how many, and whether small is good."""
    match = _BEST.fullmatch(text.strip())
    if match is None:
        raise OptionsError(
            f"option keep.best: {text!r} does not say how many, and which are good",
            hint='write "3 lowest" for a loss, "3 highest" for an accuracy',
        )
    return int(match[1]), match[2] == "lowest"


def _at_least(least: int, name: str, value: int) -> None:
    if value < least:
        raise OptionsError(f"option {name}: {value}, expected {least} or more")


def _interval(name: str, value: str | int) -> None:
    if isinstance(value, int):
        _at_least(1, name, value)
    elif value != AUTO:
        duration_seconds(name, value)


def _batch(name: str, value: str | int) -> None:
    if isinstance(value, int):
        _at_least(0, name, value)
    elif value != AUTO:
        raise OptionsError(f'option {name}: {value!r}, expected a number of records or "auto"')


def _percent(name: str, value: float) -> None:
    if not 0 < value <= 100:
        raise OptionsError(f"option {name}: {value}, expected more than 0, at most 100")


_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "every": _interval,
    "durable_every": _interval,
    "durable_log": _batch,
    "overhead_budget_percent": _percent,
    "keep.last": partial(_at_least, 1),
    **dict.fromkeys(("keep.every", "keep.hourly", "keep.daily"), partial(_at_least, 0)),
    "keep.best": lambda _, text: text and best_of(text),
    "keep.slots": partial(_at_least, 0),
    "tuning.fingerprint_every": partial(_at_least, 0),
    "tuning.mtbf": lambda name, text: text is None or duration_seconds(name, text),
    "tuning.idle_exit": duration_seconds,
    "tuning.store_quota": size_bytes,
    "tuning.disk_bytes_per_second": size_bytes,
    "tuning.disk_bytes_per_day": size_bytes,
    "tuning.bucket_bytes_per_second": partial(_at_least, 0),
}


def checked(name: str, kind: Any, value: Any) -> Any:
    """The value, if it has the option's type and lies within its bounds."""
    if isinstance(value, Path):
        value = str(value)
    try:
        if _is_struct(kind) and not isinstance(value, kind):  # msgspec would take a dict for it
            raise msgspec.ValidationError
        value = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise OptionsError(
            f"option {name}: {redacted(repr(value))}, expected {_in_words(kind)}"
        ) from None
    if isinstance(value, str) and not is_text(value):
        raise OptionsError(
            f"option {name}: {redacted(value)!r} is no valid text", hint="write it in UTF-8"
        )
    if check := _CHECKS.get(name):
        check(name, value)
    return value


def _in_words(kind: Any) -> str:
    if _is_struct(kind):
        return f"everystep.{kind.__name__}(…)"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return 'a tuple of names, as in ("lr", "weight_decay")'
    return _WORDS.get(kind) or " or ".join(_in_words(k) for k in get_args(kind) if k in _WORDS)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
