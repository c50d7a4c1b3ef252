"""Host memory that devices may copy from and to by themselves."""

from __future__ import annotations

import contextlib
import logging
import weakref

import torch

from everystep.lane.limits import LOCKED, limit_bytes
from everystep.lane.memory import populate

log = logging.getLogger("everystep")

_locked: dict[
    int, weakref.finalize[..., torch.Tensor]
] = {}  # by address, what lets the pages go; each is done once
refusals: list[str] = []  # why memory could not be locked in this process, each reason once


def lock_pages(memory: torch.Tensor) -> bool:
    """Let devices copy from and to this memory by themselves, until `unlock_pages` or the tensor's end.
    Refused: copies wait, and stay correct."""
    address = memory.data_ptr()
    populate(address, memory.nbytes)
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code == 0:
        # addresses that are mapped again while still registered lead a device to the pages of before
        _locked[address] = weakref.finalize(memory, runtime.cudaHostUnregister, address)
        _locked[address].atexit = False
        return True
    _tell(code)
    _forget_error()
    return False


def _tell(code: int) -> None:
    """Once for each reason: the log warns, and status lists it."""
    limit = limit_bytes(LOCKED)
    allowed = "unlimited" if limit < 0 else f"{limit / 2**20:.0f} MiB"
    reason = (
        f"page-locking is refused here (CUDA error {code}, {LOCKED.ulimit} is {allowed}): "
        "copies between GPU and host are slower, and training waits for them"
    )
    if reason not in refusals:
        refusals.append(reason)
        log.warning("page_locking_refused: %s", reason)


def _forget_error() -> None:
    """A refused call leaves an error behind that the next kernel, anybody's, would raise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def unlock_pages(memory: torch.Tensor) -> None:
    unlock = _locked.pop(memory.data_ptr(), None)
    if unlock is not None:
        unlock()
