"""Every optimizer that has a twin, in every implementation and dtype, checked on every device there is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from everystep.errors import UsageError
from everystep.native import missing
from everystep.replay.rules import RULES
from everystep.replay.selfcheck import Probe, differences

_HOW: dict[str, dict[str, Any]] = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def check_all(elements: int, steps: int) -> dict[str, Any]:
    if (absent := missing()) is not None:
        raise UsageError(
            f"selfcheck: {absent.why}, so torch replays every step", hint=absent.remedy
        )
    probe = Probe(sizes=(1, 3, 1023, elements, elements + 1), steps=steps, per_pass=8, threads=4)
    return {"torch": str(torch.__version__), "rows": list(_rows(probe))}


def _rows(probe: Probe) -> Iterator[dict[str, Any]]:
    probes = [probe for rule in RULES.values() for probe in rule.probes]
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in map(torch.device, devices):
        for dtype in (torch.float32, torch.bfloat16):
            for title, name, settings in probes:
                for how, flags in _HOW.items():
                    build = partial(getattr(torch.optim, name), lr=1e-3, **settings, **flags)
                    found = differences(build, device, dtype, probe)
                    yield _row(title, how, dtype, device, found)


def _row(
    name: str, how: str, dtype: torch.dtype, device: torch.device, found: dict[str, int]
) -> dict[str, Any]:
    """The nearest twin; on the CPU torch itself replays what has none, with the same bits."""
    best = min(found, key=lambda twin: found[twin], default=None)
    exact = best is not None and found[best] == 0
    on_cpu = device.type == "cpu"
    return {
        "optimizer": name,
        "implementation": how,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "differing": found[best] if best else None,
        "twin": best if exact else "torch",
        "tier": "exact" if exact or on_cpu else "bounded",
        "candidates": found,
    }
