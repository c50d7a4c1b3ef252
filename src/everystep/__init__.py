"""everystep: every training step is a checkpoint."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everystep.api import attach, restore
    from everystep.batches import data
    from everystep.compression.compressor import compress
    from everystep.errors import EverystepError
    from everystep.options import Keep, Tuning
    from everystep.ranks import compare_ranks
    from everystep.session import Run
    from everystep.store.reader import StoredRun, open_run

__version__ = "0.1.0"

# resolved on first use: the commands that only read a store must not import torch
_HOMES = {
    "EverystepError": "everystep.errors",
    "Keep": "everystep.options",
    "Run": "everystep.session",
    "StoredRun": "everystep.store.reader",
    "Tuning": "everystep.options",
    "attach": "everystep.api",
    "compare_ranks": "everystep.ranks",
    "compress": "everystep.compression.compressor",
    "data": "everystep.batches",
    "open_run": "everystep.store.reader",
    "restore": "everystep.api",
}

__all__ = [
    "EverystepError",
    "Keep",
    "Run",
    "StoredRun",
    "Tuning",
    "attach",
    "compare_ranks",
    "compress",
    "data",
    "open_run",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'everystep' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
