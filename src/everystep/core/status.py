"""The status document: its fields, how it is put together, and the sentence that it begins with.

On its way it is a plain map, so that the document of another version can still be shown. docs/STATUS.md says
what each field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from everystep.core.forecast import Forecast


class BucketStatus(msgspec.Struct, frozen=True):
    url: str | None = None
    step: int | None = None
    behind_steps: int | None = None
    behind_bytes: int | None = None
    sent_bytes: int | None = None
    retries: int | None = None
    last_error: str | None = None
    fenced: bool | None = None


class MeasuredStatus(msgspec.Struct, frozen=True):
    iteration_seconds: float | None = None
    base_bytes: int | None = None
    base_write_seconds: float | None = None
    base_slowdown: float | None = None
    record_bytes: float | None = None
    log_writes: int | None = None
    log_write_seconds: float | None = None
    log_write_bytes: float | None = None
    log_slowdown: float | None = None
    replay_seconds_per_step: float | None = None
    replay_threads: int | None = None
    cores: int | None = None


class PlanStatus(msgspec.Struct, frozen=True):
    base_every: int | None = None
    batch: int | None = None
    spread: int | None = None
    threads: int | None = None


class TunerStatus(msgspec.Struct, frozen=True):
    plan: PlanStatus | None = None
    predicted_overhead_percent: float | None = None
    predicted_waste: float | None = None
    mtbf_seconds: float | None = None
    mtbf_why: str | None = None
    reason: str | None = None


class LimitsStatus(msgspec.Struct, frozen=True):
    store_quota: int | None = None
    disk_bytes_per_second: int | None = None
    disk_bytes_per_day: int | None = None
    store_bytes: int | None = None
    written_last_day_bytes: int | None = None
    waited_seconds: float | None = None


class Status(msgspec.Struct, frozen=True):
    """None: not known, or there is no such thing now."""

    summary: str | None = None
    run: str | None = None
    # tiers: what each holds
    shadow_step: int | None = None
    durable_step: int | None = None
    durable_age_seconds: float | None = None
    based_step: int | None = None
    term: int | None = None
    bucket: BucketStatus | None = None
    exactness: str | None = None
    exactness_why: str | None = None
    # health
    health: str | None = None
    problem: str | None = None
    outlives_trainer: bool | None = None
    outlives_why: str | None = None
    outlives_oom: bool | None = None
    limitations: list[str] | None = None
    # processes
    pid: int | None = None
    trainer_pid: int | None = None
    warm: bool | None = None
    messages_refused: int | None = None
    # the replica and the ring
    replayed_step: int | None = None
    atoms: int | None = None
    based_atoms: int | None = None
    optimizers: dict[str, list[str]] | None = None
    records: int | None = None
    replay_passes: int | None = None
    replay_seconds: float | None = None
    fingerprints_checked: int | None = None
    repairs: int | None = None
    repaired: list[str] | None = None
    ring_waiting: int | None = None
    ring_slots: int | None = None
    log_steps: int | None = None
    log_bytes: int | None = None
    memory_bytes: int | None = None
    # the store
    writing: bool | None = None
    store_operations: int | None = None
    bases_written: int | None = None
    durable_bytes: int | None = None
    durable_write_bytes_per_second: float | None = None
    durable_bytes_per_day: float | None = None
    written_between: list[tuple[float, float]] | None = None
    log_bytes_written: int | None = None
    log_records_dropped: int | None = None
    log_codec: str | None = None
    disk_forecast: Forecast | None = None
    limits: LimitsStatus | None = None
    # what was measured, and what follows
    measured: MeasuredStatus | None = None
    tuner: TunerStatus | None = None
    # the trainer's own part
    enabled: bool | None = None
    step: int | None = None
    trainer_step: int | None = None
    lag_steps: int | None = None
    mode: str | None = None
    mode_why: str | None = None
    resumed_from: str | None = None
    attach_seconds: dict[str, float] | None = None
    compression: list[str] | None = None
    records_dropped: int | None = None
    rebases: int | None = None
    edits: int | None = None
    stall_seconds: float | None = None
    device_stall_seconds: float | None = None
    slowdown_percent: float | None = None
    early_tap: list[str] | None = None
    early_gradients: int | None = None
    snapshots: int | None = None
    fingerprint_every: int | None = None
    unmoved_gradients: list[str] | None = None
    link_bytes_per_second: float | None = None
    window_seconds: float | None = None
    state_dict_seconds_total: float | None = None
    state_dict_seconds_max: float | None = None


def build_status(run: str, *parts: Mapping[str, Any]) -> dict[str, Any]:
    """The document from what each process tells of it, in the order of the fields; later parts win."""
    told: dict[str, Any] = {"run": run}
    for part in parts:
        told |= part
    told["summary"] = summary(told)
    ordered = dict.fromkeys((*Status.__struct_fields__, *told))
    return {name: told[name] for name in ordered if name in told}


def read_status(document: Mapping[str, Any]) -> Status:
    """What is understood of a document: a field that another version means otherwise counts as not known."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(Status):
        try:
            found[field.name] = msgspec.convert(document.get(field.name), field.type)
        except msgspec.ValidationError:
            continue
    return Status(**found)


def summary(status: Mapping[str, Any]) -> str:
    """What each fault would cost right now, in one sentence."""
    durable = status.get("durable_step")
    in_memory = status.get("shadow_step") if status.get("outlives_trainer") else None
    known = [step for step in (in_memory, durable) if step is not None]
    process = max(known, default=None)
    age = status.get("durable_age_seconds")
    host = _step(durable) + (f", {span(age)} old" if age is not None else "")
    exact = status.get("exactness") or "exactness unknown"
    bucket = status.get("bucket")
    lost = f"; disk lost → {_step(bucket['step'])}" if bucket else ""
    return f"process dies → {_step(process)}; host dies → {host}{lost}; {exact}"


def _step(step: int | None) -> str:
    return "nothing to resume" if step is None else f"step {step}"


def span(seconds: float) -> str:
    """A time in the unit that people would use."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
