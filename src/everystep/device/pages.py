"""Host memory that devices may copy from and to by themselves."""

from __future__ import annotations

import contextlib

import torch

from everystep.lane.memory import populate

_page_locked: dict[int, int] = {}  # bytes registered with the driver at each address


def lock_pages(memory: torch.Tensor) -> bool:
    """Let devices copy from and to this memory by themselves. Refused: copies wait, and stay correct."""
    start, size = memory.data_ptr(), memory.nbytes
    # what is still registered here was unmapped by somebody who did not say so: a device would write to the
    # pages that were behind these addresses then
    for address in [a for a, n in _page_locked.items() if a < start + size and start < a + n]:
        _forget(address)
    populate(start, size)
    code = torch.cuda.cudart().cudaHostRegister(start, size, 0)
    if int(code) == 0:
        _page_locked[start] = size
        return True
    # a refused call leaves an error behind that the next kernel, anybody's, would raise
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
    return False


def unlock_pages(memory: torch.Tensor) -> None:
    if memory.data_ptr() in _page_locked:
        _forget(memory.data_ptr())


def _forget(address: int) -> None:
    del _page_locked[address]
    torch.cuda.cudart().cudaHostUnregister(address)
