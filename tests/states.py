"""Random states for stores that nobody trained: valid ones, which may carry numbers along."""

from __future__ import annotations

import random
import struct
from array import array

import msgspec

from everystep.format.random_states import RandomStates, unpack_random_states

_SEED = struct.Struct("<QQ")  # of a CUDA device, and its offset
_TORCH_BYTES = 5056


def random_states(*numbers: int) -> bytes:
    """The numbers are seeds of CUDA devices, which any machine may have fewer of."""
    version, words, gauss = random.Random(0).getstate()
    torch_cpu = struct.pack("<QiiQ", 0, 1, 1, 0).ljust(_TORCH_BYTES, b"\0")
    cuda = tuple(_SEED.pack(number, 0) for number in numbers)
    python = (version, array("L", words).tobytes(), gauss)
    return msgspec.msgpack.encode(RandomStates(python, None, torch_cpu, cuda))


def numbers_in(encoded: bytes) -> list[int]:
    return [_SEED.unpack(state)[0] for state in unpack_random_states(encoded).torch_cuda]
