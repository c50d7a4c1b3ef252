"""Host memory that devices may copy from and to by themselves."""

from __future__ import annotations

import contextlib

import torch

from everystep.lane.memory import populate

_page_locked: set[int] = set()  # addresses registered with the driver, each once


def lock_pages(memory: torch.Tensor) -> bool:
    """Let devices copy from and to this memory by themselves. Refused: copies wait, and stay correct."""
    populate(memory.data_ptr(), memory.nbytes)
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) == 0:
        _page_locked.add(memory.data_ptr())
        return True
    # a refused call leaves an error behind that the next kernel, anybody's, would raise
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
    return False


def unlock_pages(memory: torch.Tensor) -> None:
    if memory.data_ptr() in _page_locked:
        _page_locked.discard(memory.data_ptr())
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
