"""What recording has cost and repaired since attach, over every ring there has been."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from everystep.capture.tap import Tap

NO_FIGURES: Mapping[str, Any] = MappingProxyType(
    {
        "records_dropped": 0,
        "rebases": 0,
        "edits": 0,
        "stall_seconds": 0,
        "device_stall_seconds": 0,
    }
)


def figures(past: Mapping[str, Any], tap: Tap) -> Mapping[str, Any]:
    """Those of the rings before, and of the one in use."""
    now = {
        "records_dropped": tap.dropped,
        "rebases": tap.record.rebases,
        "edits": tap.record.states.edits,
        "stall_seconds": tap.record.outbox.stall_seconds,
        "device_stall_seconds": tap.record.copier.stall_seconds,
    }
    return {name: past[name] + now[name] for name in now} | tap.rates
