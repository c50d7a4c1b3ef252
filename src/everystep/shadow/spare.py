"""When memory runs out the trainer should die, not the process that holds its state."""

from __future__ import annotations

import logging

import msgspec

from everystep.core.geometry import replica_bytes
from everystep.core.survival import after_oom_score, spared
from everystep.lane.host import lower_oom_score_adj, oom_score_adj, read_facts
from everystep.shadow.config import ShadowConfig

log = logging.getLogger(__name__)


def spare_from_oom(config: ShadowConfig) -> ShadowConfig:
    """Lower our oom_score_adj by what holds the state. The trainer's is left alone: it is not ours to change.
    The verdict that comes back tells whether it was allowed."""
    held = replica_bytes(config.census) + config.geometry.bytes
    wanted = spared(read_facts(), held, oom_score_adj())
    reached = lower_oom_score_adj(wanted)
    log.info("oom_score_adj wanted=%d reached=%d", wanted, reached)
    verdict = after_oom_score(config.survival, wanted, reached)
    return msgspec.structs.replace(config, survival=verdict)
