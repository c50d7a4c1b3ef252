"""Every random state that training may draw from, as bytes."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import msgspec
import torch


class RandomStates(msgspec.Struct, frozen=True, array_like=True):
    python: tuple[int, bytes, float | None]
    numpy: tuple[str, bytes, int, int, float] | None
    torch_cpu: bytes
    torch_cuda: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(RandomStates)


def capture_rng() -> bytes:
    """States of python, numpy (if it was imported), torch on the CPU and every CUDA device in use."""
    version, words, gauss = random.getstate()
    states = RandomStates(
        python=(version, array("L", words).tobytes(), gauss),
        numpy=_numpy_state(),
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        torch_cuda=_cuda_states(),
    )
    return msgspec.msgpack.encode(states)


def restore_rng(data: bytes) -> None:
    states = _decoder.decode(data)
    version, words, gauss = states.python
    random.setstate((version, tuple(array("L", words)), gauss))
    if states.numpy is not None:
        import numpy as np

        name, keys, position, has_gauss, cached = states.numpy
        np.random.set_state((name, np.frombuffer(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(states.torch_cpu))
    if torch.cuda.is_available():
        for device, state in enumerate(states.torch_cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(state), device)


def _numpy_state() -> Any:
    if "numpy" not in sys.modules:
        return None
    import numpy as np

    state = np.random.get_state(legacy=False)
    if isinstance(state, dict) and state["bit_generator"] == "MT19937":
        inner = state["state"]
        return (
            "MT19937",
            inner["key"].tobytes(),
            int(inner["pos"]),
            int(state["has_gauss"]),
            float(state["gauss"]),
        )
    return None


def _cuda_states() -> tuple[bytes, ...]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ()
    return tuple(s.numpy().tobytes() for s in torch.cuda.get_rng_state_all())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
