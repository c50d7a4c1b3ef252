"""Host memory that devices may copy from and to by themselves."""

from __future__ import annotations

import contextlib
import weakref

import torch

from everystep.lane.memory import populate

_locked: dict[
    int, weakref.finalize[..., torch.Tensor]
] = {}  # by address, what lets the pages go; each is done once


def lock_pages(memory: torch.Tensor) -> bool:
    """Let devices copy from and to this memory by themselves, until `unlock_pages` or the tensor's end.
    Refused: copies wait, and stay correct."""
    address = memory.data_ptr()
    populate(address, memory.nbytes)
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) == 0:
        # addresses that are mapped anew while still registered lead a device to the pages of before
        _locked[address] = weakref.finalize(memory, runtime.cudaHostUnregister, address)
        _locked[address].atexit = False
        return True
    # a refused call leaves an error behind that the next kernel, anybody's, would raise
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
    return False


def unlock_pages(memory: torch.Tensor) -> None:
    unlock = _locked.pop(memory.data_ptr(), None)
    if unlock is not None:
        unlock()
