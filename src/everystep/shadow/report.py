"""The shadow's part of the status document."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from everystep.core.survival import Survival
from everystep.lane.control import ControlServer, NoticeBoard
from everystep.lane.descriptors import DescriptorServer
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.intake import Intake
from everystep.shadow.logkeeper import LogKeeper
from everystep.shadow.shipper import Shipper

_DAY_SECONDS = 86400.0


def describe_intake(intake: Intake) -> dict[str, Any]:
    """What is in memory, and how exact it is."""
    census, ring = intake.census, intake.ring
    drifted = bool(intake.drifted)
    return {
        "shadow_step": intake.sealed_step if intake.whole else None,
        "replayed_step": intake.step if intake.whole else None,
        "based_atoms": sum(intake.replica.based),
        "atoms": len(census.atoms),
        "exactness": "bounded" if drifted else census.exactness,
        "exactness_why": "some atoms are being re-based" if drifted else census.why,
        "records": intake.records,
        "replay_passes": intake.passes,
        "replay_seconds": intake.replay_seconds,
        "repairs": intake.state.repairs,
        "repaired": intake.state.repaired,
        "fingerprints_checked": intake.state.prints_checked,
        "ring_waiting": ring.waiting,
        "ring_slots": ring.geometry.slots,
        "log_steps": intake.state.tail.steps,
        "log_bytes": intake.state.tail.nbytes,
        "memory_bytes": sum(e.bytes for e in intake.replica.extents) + ring.geometry.bytes,
        "optimizers": {
            spec.key or "optimizer": [spec.mode.value, spec.why] for spec in census.optimizers
        },
    }


def describe_process(
    survival: Survival,
    refused: str,
    control: ControlServer,
    board: NoticeBoard,
    descriptors: DescriptorServer,
) -> dict[str, Any]:
    """What would end it, what the kernel refused it, and what its sockets refused."""
    return {
        "pid": os.getpid(),
        "messages_refused": control.refused + board.refused + descriptors.refused,
        "outlives_trainer": survival.outlives,
        "outlives_oom": survival.outlives_oom,
        "outlives_why": survival.because,
        "limitations": [refused] if refused else [],
    }


def describe_store(
    base_writer: BaseWriter, log: LogKeeper | None, shipper: Shipper, log_is_resumed: bool = True
) -> dict[str, Any]:
    """What is durable, by bases or by the log behind them, and at which rate the disk is worn."""
    state = base_writer.state
    elapsed = max(time.monotonic() - base_writer.started, 60.0)
    step, age = state.durable.step if state.durable else None, state.durable_age_seconds
    if step is not None and log is not None and log_is_resumed and log.reaches(step) > step:
        step, age = log.reaches(step), time.monotonic() - log.written_at
    total = state.bytes_written + (log.bytes_written if log else 0)
    return {
        "term": state.term or None,
        "durable_step": step,
        "durable_age_seconds": age if step is not None and math.isfinite(age) else None,
        "based_step": state.durable.step if state.durable else None,
        "bases_written": state.bases,
        "durable_bytes": total,
        "log_records_dropped": log.dropped if log else 0,
        "log_bytes_written": log.bytes_written if log else 0,
        "log_codec": f"{log.codec.how}, {log.codec.ratio:.2f} to 1" if log else "",
        "durable_write_bytes_per_second": state.write_bytes_per_second,
        "durable_bytes_per_day": total * _DAY_SECONDS / elapsed,
        "limits": base_writer.meter.describe(),
        "writing": base_writer.busy,
        "store_operations": base_writer.meter.operations,
        "written_between": base_writer.spans.ended,
        "bucket": shipper.describe(state, step),
    }
