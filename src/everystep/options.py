"""What a user may choose, checked once. Explicit arguments beat EVERYSTEP_* variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from everystep.errors import OptionsError

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
    """False installs no hook and starts no process; so does EVERYSTEP_DISABLE=1."""

    def __post_init__(self) -> None:
        _one_of("residuals", self.residuals, ("lossy", "exact"))
        _one_of("resume", self.resume, ("auto", "never", "must"))
        _one_of("on_lag", self.on_lag, ("drop", "wait"))
        _one_of("on_failure", self.on_failure, ("warn", "raise"))
        _steps_or_duration("every", self.every)
        if self.durable_every != AUTO:
            _steps_or_duration("durable_every", self.durable_every)
        if not 0 < self.overhead_budget_percent <= 100:
            raise OptionsError(
                f"option overhead_budget_percent: {self.overhead_budget_percent}, expected 0 to 100"
            )
        if self.fingerprint_every < 0:
            raise OptionsError(f"option fingerprint_every: {self.fingerprint_every}, expected >= 0")
        if self.durable_log != AUTO and not _is_count(self.durable_log):
            raise OptionsError(
                f'option durable_log: {self.durable_log!r}, expected a number of records or "auto"'
            )
        if self.bucket_bytes_per_second < 0:
            raise OptionsError(
                f"option bucket_bytes_per_second: {self.bucket_bytes_per_second}, expected >= 0"
            )
        duration_seconds("idle_exit", self.idle_exit)
        if self.mtbf is not None:
            duration_seconds("mtbf", self.mtbf)
        if self.keep_last < 1:
            raise OptionsError(f"option keep_last: {self.keep_last}, expected >= 1")
        for name in ("keep_every", "keep_hourly", "keep_daily", "keep_slots"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 0:
                raise OptionsError(f"option {name}: {count!r}, expected a number >= 0")
        if self.keep_best:
            best_of(self.keep_best)
        for name in ("store_quota", "disk_bytes_per_second", "disk_bytes_per_day"):
            size_bytes(name, getattr(self, name))


def resolve(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """Options from explicit arguments, then the environment, then the defaults."""
    known = {field.name for field in fields(Options)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise OptionsError(
            f"attach: unknown option {unknown[0]!r}",
            hint=f"known options: {', '.join(sorted(known))}",
        )
    values: dict[str, Any] = {}
    for name in known - {"enabled"}:
        text = environment.get(f"EVERYSTEP_{name.upper()}")
        if text is not None:
            values[name] = _from_text(name, text)
    if environment.get("EVERYSTEP_DISABLE", "") not in ("", "0"):
        values["enabled"] = False
    return Options(**{**values, **given})


def _from_text(name: str, text: str) -> Any:
    """An option's value as an environment variable says it."""
    if name == "log":
        return text not in ("0", "false", "no")
    if name == "overhead_budget_percent":
        try:
            return float(text)
        except ValueError:
            raise OptionsError(f"option {name}: {text!r} is not a number") from None
    return int(text) if text.isdigit() else text


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
    match = _BEST.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise OptionsError(
            f"option keep_best: {text!r} does not say how many, and which are good",
            hint='write "3 lowest" for a loss, "3 highest" for an accuracy',
        )
    return int(match[1]), match[2] == "lowest"


def _steps_or_duration(name: str, value: str | int) -> None:
    if isinstance(value, str):
        duration_seconds(name, value)
    elif value < 1:
        raise OptionsError(f"option {name}: {value} steps, expected >= 1")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionsError(f"option {name}: {value!r}, expected one of {', '.join(choices)}")
