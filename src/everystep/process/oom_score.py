"""When memory runs out the trainer should die, not the process that holds its state."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from everystep.core.geometry import replica_bytes
from everystep.core.survival import after_oom_score, spared
from everystep.lane.host import read_facts
from everystep.process.config import ShadowConfig

log = logging.getLogger(__name__)

_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")


def spare_from_oom(config: ShadowConfig) -> ShadowConfig:
    """Lower our oom_score_adj by what holds the state. The trainer's is left alone: it is not ours to change.
    The verdict that comes back tells whether it was allowed."""
    held = replica_bytes(config.census) + config.geometry.bytes
    wanted = spared(read_facts(), held, oom_score_adj())
    reached = lower_oom_score_adj(wanted)
    log.info("oom_score_adj wanted=%d reached=%d", wanted, reached)
    verdict = after_oom_score(config.survival, wanted, reached)
    return msgspec.structs.replace(config, survival=verdict)


def oom_score_adj(file: Path = _OOM_SCORE_ADJ) -> int:
    try:
        text = file.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.lstrip("-").isdigit() else 0


def lower_oom_score_adj(target: int, file: Path = _OOM_SCORE_ADJ) -> int:
    """Have the OOM killer spare this process, as far towards `target` as we may; returns how far that is.

    Below what it was started with a process needs CAP_SYS_RESOURCE, but what was raised without it may be
    lowered again without it.
    """
    reached, refused = oom_score_adj(file), target - 1
    while reached > refused + 1:
        value = target if refused < target else (reached + refused) // 2
        try:
            file.write_text(str(value))
            reached = value
        except OSError:
            refused = value
    return reached


def may_lower_oom_score_adj(file: Path = _OOM_SCORE_ADJ) -> bool:
    """Tried by one; raising it again is always allowed."""
    before = oom_score_adj(file)
    lowered = lower_oom_score_adj(before - 1, file) < before
    if lowered:
        file.write_text(str(before))
    return lowered
