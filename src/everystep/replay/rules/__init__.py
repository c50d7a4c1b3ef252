"""One module for each rule of an optimizer: its slots, the numbers of its steps, its twins and probes."""

from __future__ import annotations

import importlib
import pkgutil

from everystep.replay.rules.rule import Rule

_MODULES = [
    importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)
]
RULES: dict[str, Rule] = {
    module.RULE.name: module.RULE for module in _MODULES if hasattr(module, "RULE")
}
"""By name. A new module is found by itself."""
