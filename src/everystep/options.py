"""What a user may choose, checked once. Explicit arguments beat EVERYSTEP_* variables."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from everystep.errors import OptionsError
from everystep.text import is_text, redacted, switch

AUTO = "auto"
_UNITS_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BEST = re.compile(r"([1-9]\d*)\s+(lowest|highest)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i?))?b?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")


@dataclass(frozen=True)
class Options:
    """The dials of `attach`; docs in README, the list is frozen by a test."""

    every: str | int = 1
    """1 records every step; a number of steps or a duration takes a base that often, without a log."""
    log: bool = True
    """False sends the state itself at every step instead of the gradients it was made from."""
    overhead_budget_percent: float = 0.5
    """How much training may be slowed down while a base is taken; the base takes more steps instead."""
    fingerprint_every: int = 0
    """Steps from one digest of the whole state, compared with the replica, to the next; 0: as often as a
    thousandth of training's time allows."""
    durable_every: str | int = "10m"
    """How often the shadow writes a base to the store: a duration ("10m"), a number of steps, or "auto": the
    tuner's choice."""
    durable_log: int | str = 0
    """So many records at a time are written to the store, synced, between bases; 0: only bases are; "auto":
    the tuner's choice."""
    mtbf: str | None = None
    """How long it takes on average until something fails here ("6h"), for the tuner; none: from history."""
    residuals: Literal["lossy", "exact"] = "lossy"
    """Of compression with feedback, which logs do not hold: a resume past a base takes the base's, or goes
    back to the base."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the newest step if there is one; refuse a run that has steps; or refuse one that has none.
    "must" also adopts what a living shadow holds whose run directory is gone."""
    on_lag: Literal["drop", "wait"] = "drop"
    """A full ring lets records go and re-bases later, or makes the trainer wait."""
    on_failure: Literal["warn", "raise"] = "warn"
    """A failure of everystep during training degrades loudly, or raises in the trainer."""
    keep_last: int = 3
    """How many of the last bases stay (what a kept base refers to stays too), with the log behind them."""
    keep_every: int = 0
    """The first base of every so many steps stays for good; 0: none does."""
    keep_hourly: int = 0
    """The first base of an hour stays, for so many hours that have one."""
    keep_daily: int = 0
    """The first base of a day stays, for so many days that have one."""
    keep_best: str = ""
    """So many bases stay by what `run.report` told: "3 lowest" or "3 highest"."""
    keep_slots: int = 0
    """Optimizer slots stay with so many of the last bases, weights with all that are kept; 0: with all."""
    idle_exit: str = "1h"
    """How long a shadow without a trainer keeps serving before it goes away."""
    store_quota: str | int = 0
    """The most that the run's directory may hold ("200GB", or bytes): older bases go early, tags stay; 0: no
    limit."""
    disk_bytes_per_second: str | int = 0
    """The most that bases and log together write in a second ("500MB", or bytes); 0: no limit."""
    disk_bytes_per_day: str | int = 0
    """The most that they write in 24 hours: bases come less often. The first base, last words, and what flush
    and close ask for are written all the same; 0: no limit."""
    bucket: str | None = None
    """URL of a bucket that is kept behind the run's directory (s3://, gs://, az://, file://)."""
    bucket_bytes_per_second: int = 0
    """The most that is sent to the bucket; 0: as fast as it takes it."""
    arena_dir: str | None = None
    """Directory for shared memory instead of anonymous memory (memfd)."""
    enabled: bool = True
    """False installs no hook and starts no process; so do EVERYSTEP_ENABLED=0 and EVERYSTEP_DISABLE=1."""

    override: tuple[str, ...] = ()
    """Values of the optimizer's param groups that the script sets and a resume must not replace: ("lr",)."""

    def __post_init__(self) -> None:
        for name in _KINDS:
            _checked(name, getattr(self, name))


_KINDS: dict[str, Any] = get_type_hints(Options)
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
_SIZES = ("store_quota", "disk_bytes_per_second", "disk_bytes_per_day")
_DURATIONS = ("every", "durable_every", "idle_exit", "mtbf")  # wherever they are text


def resolve(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """Options from explicit arguments, then the environment, then the defaults. An argument must have the
    option's type; a variable is text and is read as that type."""
    unknown = sorted(set(given) - set(_KINDS))
    if unknown:
        raise OptionsError(
            f"attach: unknown option {unknown[0]!r}",
            hint=f"known options: {', '.join(sorted(_KINDS))}",
        )
    values = {
        name: _from_environment(name, variable, environment[variable])
        for name in _KINDS
        if environment.get(variable := f"EVERYSTEP_{name.upper()}")  # an empty one says nothing
    }
    disable = environment.get("EVERYSTEP_DISABLE")
    if disable and _from_environment("enabled", "EVERYSTEP_DISABLE", disable):
        values["enabled"] = False
    return Options(**values | {name: _checked(name, value) for name, value in given.items()})


def _from_environment(name: str, variable: str, text: str) -> Any:
    kind = _KINDS[name]
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
        return _checked(name, value)
    except OptionsError as error:
        raise OptionsError(
            f"{variable}={redacted(text)}: {error.args[0]}", hint=error.hint
        ) from None


def _checked(name: str, value: Any) -> Any:
    """The value, if it has the option's type and lies within its bounds."""
    kind = _KINDS[name]
    if isinstance(value, Path):
        value = str(value)
    try:
        value = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise OptionsError(
            f"option {name}: {redacted(repr(value))}, expected {_in_words(kind)}"
        ) from None
    if isinstance(value, str) and not is_text(value):
        raise OptionsError(
            f"option {name}: {redacted(value)!r} is no valid text", hint="write it in UTF-8"
        )
    if name in _DURATIONS and isinstance(value, str):
        if name != "durable_every" or value != AUTO:
            duration_seconds(name, value)
    elif name == "durable_log" and isinstance(value, str) and value != AUTO:
        raise OptionsError(f'option {name}: {value!r}, expected a number of records or "auto"')
    elif name == "overhead_budget_percent" and not 0 < value <= 100:
        raise OptionsError(f"option {name}: {value}, expected more than 0, at most 100")
    elif name == "keep_best" and value:
        best_of(value)
    elif name in _SIZES:
        size_bytes(name, value)
    elif isinstance(value, int) and value < (least := _least(name)):
        raise OptionsError(f"option {name}: {value}, expected {least} or more")
    return value


def _least(name: str) -> int:
    return 1 if name in ("every", "durable_every", "keep_last") else 0


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return 'a tuple of names, as in ("lr", "weight_decay")'
    return _WORDS.get(kind) or " or ".join(_in_words(k) for k in get_args(kind) if k in _WORDS)


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
            f"option keep_best: {text!r} does not say how many, and which are good",
            hint='write "3 lowest" for a loss, "3 highest" for an accuracy',
        )
    return int(match[1]), match[2] == "lowest"
