"""What a user may choose: the keywords of `attach`, `Keep` and `Tuning`. Every value is checked where it is
given. `environment.py` reads what was not given."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import msgspec
from msgspec import UNSET

from everystep.option_values import AUTO, checked

NOT_GIVEN: Any = UNSET  # fits every type, for `Options` replaces it


class Checked(msgspec.Struct, frozen=True):
    """Options that are checked when they are given."""

    prefix: ClassVar[str] = ""  # of their names in messages

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            if value is not UNSET:
                value = checked(self.prefix + field.name, field.type, value)
                msgspec.structs.force_setattr(self, field.name, value)


class Group(Checked, frozen=True):
    """Options that are given together."""

    def over(self, other: Self) -> Self:
        """These where they are given, otherwise those of the other."""
        given = {k: v for k, v in msgspec.structs.asdict(self).items() if v is not UNSET}
        return msgspec.structs.replace(other, **given)


class Keep(Group, frozen=True, kw_only=True):
    """Which bases stay in the store.

    The rules add up: a base is removed when no rule keeps it and no tag pins it. What a kept base refers to
    stays too.

    last     Keep this many of the newest bases, with the log behind them. Default: 3 bases.
    every    Keep the first base in every so many steps, for good. Default: 0 steps, none.
    hourly   Keep the first base of an hour, for this many hours that have one. Default: 0 hours, none.
    daily    Keep the first base of a day, for this many days that have one. Default: 0 days, none.
    best     Keep so many bases by what `run.report` told, "3 lowest" or "3 highest". Default: "", none.
    slots    Keep optimizer slots with this many of the newest bases, weights with all that stay.
             Default: 0 bases, slots stay with all.

    A field that is not given is taken from the variable EVERYSTEP_KEEP_<FIELD>, otherwise from the default.
    """

    prefix = "keep."

    last: int = NOT_GIVEN
    every: int = NOT_GIVEN
    hourly: int = NOT_GIVEN
    daily: int = NOT_GIVEN
    best: str = NOT_GIVEN
    slots: int = NOT_GIVEN


class Tuning(Group, frozen=True, kw_only=True):
    """Options that few need.

    Give durations as text ("90s", "10m", "2h", "1d"), and sizes as bytes or as text ("500MB", "1.5 TiB").

    log                      Record the gradients of every step. False: send the state itself. Default: True.
    fingerprint_every        Compare digests of the whole state with the replica's every so many steps. 0: as
                             often as a thousandth of training's time allows. Default: 0 steps.
    residuals                Choose where a resume goes with compression with feedback, whose residuals no log
                             holds. "lossy": to the newest step, with the residuals of the base before it.
                             "exact": to that base. Default: "lossy".
    mtbf                     Tell the tuner the mean time between failures. None: it asks the run's history.
                             Default: None.
    idle_exit                End a shadow after this time without a trainer. Default: "1h".
    arena_dir                Put shared memory into files of this directory. None: use anonymous memory
                             (memfd). Default: None.
    store_quota              Limit the size of the run's directory. Older bases are removed early, tagged ones
                             stay. Default: 0 bytes, no limit.
    disk_bytes_per_second    Limit what bases and log together write in a second. Default: 0 bytes, no limit.
    disk_bytes_per_day       Limit what they write in 24 hours: bases become rarer. The first base, last
                             words, flush and close are always written. Default: 0 bytes, no limit.
    bucket_bytes_per_second  Limit what is sent to the bucket in a second; give bytes as a number.
                             Default: 0 bytes, no limit.

    A field that is not given is taken from the variable EVERYSTEP_<FIELD>, otherwise from the default.
    """

    prefix = "tuning."

    log: bool = NOT_GIVEN
    fingerprint_every: int = NOT_GIVEN
    residuals: Literal["lossy", "exact"] = NOT_GIVEN
    mtbf: str | None = NOT_GIVEN
    idle_exit: str = NOT_GIVEN
    arena_dir: str | None = NOT_GIVEN
    store_quota: str | int = NOT_GIVEN
    disk_bytes_per_second: str | int = NOT_GIVEN
    disk_bytes_per_day: str | int = NOT_GIVEN
    bucket_bytes_per_second: int = NOT_GIVEN


_KEEP = Keep(last=3, every=0, hourly=0, daily=0, best="", slots=0)
_TUNING = Tuning(
    log=True,
    fingerprint_every=0,
    residuals="lossy",
    mtbf=None,
    idle_exit="1h",
    arena_dir=None,
    store_quota=0,
    disk_bytes_per_second=0,
    disk_bytes_per_day=0,
    bucket_bytes_per_second=0,
)


class Options(Checked, frozen=True, kw_only=True):
    """What was chosen, whole: every field has a value, those of `keep` and `tuning` too. `attach` says what
    each means."""

    resume: Literal["auto", "never", "must"] = "auto"
    override: tuple[str, ...] = ()
    every: str | int = AUTO
    durable_every: str | int = "10m"
    durable_log: int | str = 0
    on_lag: Literal["drop", "wait"] = "drop"
    on_failure: Literal["warn", "raise"] = "warn"
    overhead_budget_percent: float = 0.5
    keep: Keep = Keep()
    bucket: str | None = None
    enabled: bool = True
    tuning: Tuning = Tuning()

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "keep", self.keep.over(_KEEP))
        msgspec.structs.force_setattr(self, "tuning", self.tuning.over(_TUNING))
