"""`attach` and `restore`. What an option means, and its default, stand in `options.py`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from everystep.capture.census import LiveCensus, Models, Optimizers, take_census
from everystep.capture.groups import encode_groups
from everystep.core.census import Script
from everystep.errors import NothingToRecover, RunBusy, UsageError
from everystep.loading import give_back_groups, load_point
from everystep.options import resolve
from everystep.recover.find import RestorePoint, find_newest
from everystep.recover.load import find_and_load
from everystep.recover.meet import check_resume, hold_run, shadow_of, sync_newest
from everystep.recover.script import Comparison, check_override, compare_values, keep_values
from everystep.session import Run
from everystep.store.tiers import locate


def attach(
    model: Models,
    optimizer: Optimizers,
    *,
    run: str | Path,
    state: Mapping[str, Any] | None = None,
    every: str | int | UnsetType = UNSET,
    log: bool | UnsetType = UNSET,
    overhead_budget_percent: float | UnsetType = UNSET,
    fingerprint_every: int | UnsetType = UNSET,
    durable_every: str | int | UnsetType = UNSET,
    durable_log: int | str | UnsetType = UNSET,
    mtbf: str | UnsetType | None = UNSET,
    residuals: Literal["lossy", "exact"] | UnsetType = UNSET,
    resume: Literal["auto", "never", "must"] | UnsetType = UNSET,
    on_lag: Literal["drop", "wait"] | UnsetType = UNSET,
    on_failure: Literal["warn", "raise"] | UnsetType = UNSET,
    keep_last: int | UnsetType = UNSET,
    keep_every: int | UnsetType = UNSET,
    keep_hourly: int | UnsetType = UNSET,
    keep_daily: int | UnsetType = UNSET,
    keep_best: str | UnsetType = UNSET,
    keep_slots: int | UnsetType = UNSET,
    idle_exit: str | UnsetType = UNSET,
    store_quota: int | str | UnsetType = UNSET,
    disk_bytes_per_second: int | str | UnsetType = UNSET,
    disk_bytes_per_day: int | str | UnsetType = UNSET,
    bucket: str | UnsetType | None = UNSET,
    bucket_bytes_per_second: int | UnsetType = UNSET,
    arena_dir: str | UnsetType | None = UNSET,
    enabled: bool | UnsetType = UNSET,
    override: tuple[str, ...] | UnsetType = UNSET,
) -> Run:
    """Make every step of this training a checkpoint, and resume from the newest one there is.

    Weights, optimizer and user state are restored when this returns. Random states are restored at the
    first turn of `run.steps` (or in `run.resume`), because making an iterator draws from them. A batch that
    was fetched ahead is not fetched again unless whatever holds it is in `state`.

    run         directory of the run, or the URL of a bucket
    state       what else to restore, by name: objects with state_dict and load_state_dict, plain dicts
    every       1: every step. A number of steps or a duration: a base that often, without a log
    log, residuals, fingerprint_every    how steps are recorded and checked
    durable_every, durable_log, mtbf     how often the shadow writes to the store
    overhead_budget_percent, on_lag, on_failure    what recording may cost training
    keep_last, keep_every, keep_hourly, keep_daily, keep_best, keep_slots    which bases stay in the store
    store_quota, disk_bytes_per_second, disk_bytes_per_day    the most that is stored and written
    bucket, bucket_bytes_per_second      a bucket behind the directory
    idle_exit, arena_dir                 how long the shadow waits for a trainer, and where its memory lies
    resume      "auto", "never" (refuse a run that has steps) or "must" (fail if there is nothing)
    enabled     False: install nothing
    override    values of the optimizer that a resume takes from the script: ("lr",)

    An option that is not given is taken from the variable EVERYSTEP_<NAME>, else it has the default of
    `everystep.options.Options`, where each is described.
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
    """Load the newest step (or a retained one) without attaching; returns the step loaded. `override` names
    values of the optimizer, as ("lr",), that stay as the script has them."""
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
        done, _ = find_and_load(
            # without an optimizer nothing is replayed, and how far the log goes must be known
            lambda verify_lazily: find_newest(
                path,
                folder,
                step,
                verify_lazily=verify_lazily and optimizer is not None,
            ),
            lambda found: _load_without_attaching(found, path, script, census),
        )
        if done is None:
            raise NothingToRecover(
                f"restore {path}: no valid base", hint="everystep verify tells why"
            )
        found, compared = done
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
    if live.optimizers and give_back_groups(found, live, path):
        live = census()
    load_point(found, live, path, optimizers=bool(live.optimizers))
    keep_values(live.keyed, compared.kept)
    return compared
