"""How many processes train this model, as far as one of them can tell."""

from __future__ import annotations

import os

import torch.distributed as dist

from everystep.errors import UsageError


def refuse_many_ranks() -> None:
    """This version records one process per run."""
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        if ranks > 1:
            raise UsageError(
                f"attach: {ranks} ranks; this version records one process per run",
                hint="attach with a world size of 1",
            )
        return
    said = os.environ.get("WORLD_SIZE", "")  # by torchrun
    if said.isdigit() and int(said) > 1:
        raise UsageError(
            f"attach: WORLD_SIZE={said} in the environment, but no process group is initialised",
            hint="call torch.distributed.init_process_group before attach; this version records one rank "
            "only, so start one process, or unset WORLD_SIZE if this one trains alone",
        )
