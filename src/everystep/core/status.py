"""The sentence that `status` begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary(status: Mapping[str, Any]) -> str:
    """What each fault would cost right now, in one sentence."""
    durable = status.get("durable_step")
    in_memory = status.get("shadow_step") if status.get("outlives_trainer") else None
    known = [step for step in (in_memory, durable) if step is not None]
    process = max(known, default=None)
    age = status.get("durable_age_seconds")
    host = _step(durable) + (f", {_minutes(age)} old" if age is not None else "")
    exact = status.get("exactness") or "exactness unknown"
    bucket = status.get("bucket")
    lost = f"; disk lost → {_step(bucket['step'])}" if bucket else ""
    return f"process dies → {_step(process)}; host dies → {host}{lost}; {exact}"


def _step(step: int | None) -> str:
    return "nothing to resume" if step is None else f"step {step}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
