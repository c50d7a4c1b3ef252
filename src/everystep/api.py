"""`attach` and `restore`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET
from msgspec.structs import replace

from everystep.capture.census import LiveCensus, Models, Optimizers, take_census
from everystep.capture.groups import encode_groups
from everystep.core.census import Script
from everystep.environment import resolve
from everystep.errors import NothingToRecover, RunBusy, UsageError
from everystep.options import NOT_GIVEN, Keep, Tuning
from everystep.recover.attempts import attempts
from everystep.recover.loader import Loader
from everystep.recover.meet import check_resume, hold_run, shadow_of, sync_newest
from everystep.recover.point import RestorePoint
from everystep.recover.script import Comparison, check_override, compare_values, keep_values
from everystep.session import Run
from everystep.store.bucket.tiers import locate


def attach(
    model: Models,
    optimizer: Optimizers,
    *,
    run: str | Path,
    state: Mapping[str, Any] | None = None,
    resume: Literal["auto", "never", "must"] = NOT_GIVEN,
    override: tuple[str, ...] = NOT_GIVEN,
    every: str | int = NOT_GIVEN,
    durable_every: str | int = NOT_GIVEN,
    durable_log: int | str = NOT_GIVEN,
    on_lag: Literal["drop", "wait"] = NOT_GIVEN,
    on_failure: Literal["warn", "raise"] = NOT_GIVEN,
    overhead_budget_percent: float = NOT_GIVEN,
    keep: Keep = NOT_GIVEN,
    bucket: str | None = NOT_GIVEN,
    enabled: bool = NOT_GIVEN,
    tuning: Tuning = NOT_GIVEN,
) -> Run:
    """Make every step of this training a checkpoint, and resume from the newest one there is.

    Weights, optimizer and user state are restored when this returns. Random states are restored at the
    first turn of `run.steps` (or in `run.resume`), because making an iterator draws from them. A batch that
    was fetched ahead is not fetched again unless whatever holds it is in `state`.

    run             Directory of the run, or the URL of a bucket.
    state           What else to restore, by name: objects with state_dict and load_state_dict, plain dicts.
    resume          "auto": resume from the newest step if there is one. "never": refuse a run that has
                    steps. "must": refuse a run that has none; it also adopts what a living shadow holds
                    whose run directory is gone. Default: "auto".
    override        Values of the optimizer's param groups that a resume takes from the script: ("lr",).
                    Default: (), none.
    every           1: record every step. A number of steps or a duration ("10m"): write a base that often,
                    and no log. "auto": chosen by everystep; it means 1 so far. Default: "auto".
    durable_every   Time ("10m") or number of steps between two bases in the store. "auto": the tuner
                    chooses. Default: "10m".
    durable_log     Number of records in one synced write of the log between bases. 0: write bases alone.
                    "auto": the tuner chooses. Default: 0 records.
    on_lag          When the ring is full: "drop" records and re-base later, or make the trainer "wait".
                    Default: "drop".
    on_failure      When everystep fails during training: "warn" and degrade, or "raise" in the trainer.
                    Default: "warn".
    overhead_budget_percent
                    Slowdown of training that a base may cause; it takes more steps instead. Default: 0.5 %.
    keep            Which bases stay in the store: everystep.Keep(last=3, hourly=24, best="3 lowest").
                    Default: Keep(last=3).
    bucket          URL of a bucket behind the directory (s3://, gs://, az://, file://). Default: None.
    enabled         False: install no hook and start no process; EVERYSTEP_DISABLE=1 does the same.
                    Default: True.
    tuning          What few need: everystep.Tuning(idle_exit="1h", store_quota="200GB", …).
                    Default: Tuning().

    An option that is not given is taken from the variable EVERYSTEP_<NAME>, otherwise from the default.
    """
    given = {k: v for k, v in locals().items() if k not in _NO_OPTIONS and v is not UNSET}
    chosen = resolve(given)
    path, behind = locate(run, chosen.bucket)
    return Run(model, optimizer, path, state, replace(chosen, bucket=behind))


_NO_OPTIONS = ("model", "optimizer", "run", "state")


def restore(
    run: str | Path,
    model: Models,
    optimizer: Optimizers | None = None,
    step: int | None = None,
    *,
    override: Sequence[str] = (),
) -> int:
    """Load the newest step without attaching, or the given one if it was kept; return the step loaded.

    override    Values of the optimizer's param groups that stay as the script has them: ("lr",).
                Default: (), none.
    """
    path, bucket = locate(run)
    override = resolve({"override": override}, {}).override
    census = partial(take_census, model, optimizer if optimizer is not None else {})
    live = census()
    check_override(override, live.optimizers, {})
    script = Script(encode_groups(live.keyed), override)
    folder, lock = None, None
    with contextlib.suppress(RunBusy):  # nobody may attach to, and train on, what is read here
        folder, lock = hold_run(path, "restore")
    try:
        if folder is not None:
            check_resume(path, shadow_of(path, folder), "auto")
        if folder is not None and bucket is not None:
            sync_newest(path, bucket, folder)
        # without an optimizer nothing is replayed, and how far the log goes must be known
        for attempt in attempts(lazily=optimizer is not None):
            with attempt:
                attempt.find(path, folder, step)
                if attempt.found is None:
                    raise NothingToRecover(
                        f"restore {path}: no valid base", hint="everystep verify tells why"
                    )
                compared = _load_without_attaching(attempt.found, path, script, census)
                found = attempt.found
        found.close()
        if compared.told:
            warnings.warn(f"everystep: {compared.told}", stacklevel=2)
        return found.point.step
    finally:
        if lock is not None:
            lock.close()


def _load_without_attaching(
    found: RestorePoint, path: Path, script: Script, census: Callable[[], LiveCensus]
) -> Comparison:
    live = census()
    logged = found.tail_steps + len(found.log)
    if logged and not live.optimizers:
        raise UsageError(
            f"restore {path}: the newest {logged} steps are a log of gradients",
            hint="give the optimizer too: it replays them",
        )
    compared = compare_values(live.keyed, script, found, {})
    if live.optimizers and Loader(found, live, path).give_back_groups():
        live = census()
    Loader(found, live, path).load(weights_only=not live.optimizers)
    keep_values(live.keyed, compared.kept)
    return compared
