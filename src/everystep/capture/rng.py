"""Every random state that training may draw from, as bytes."""

from __future__ import annotations

import ctypes
import random
import sys
import warnings
from array import array
from typing import Any, get_args

import msgspec
import torch

from everystep.errors import CorruptData, UnsupportedState
from everystep.format import values
from everystep.format.random_states import MERSENNE, Numpys, RandomStates, unpack_random_states

_NUMPY_GENERATORS = get_args(Numpys)
# what generators raise that are given what is none of their states
_REFUSED = (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)
_NUMPY_WORDS = 624 + 1  # key and position of a Mersenne twister


def capture_rng() -> bytes:
    """States of python, numpy (if it was imported), torch on the CPU and every CUDA device in use."""
    version, words, gauss = random.getstate()
    states = RandomStates(
        python=(version, array("L", words).tobytes(), gauss),
        numpy=_numpy_state.get(),
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        torch_cuda=_cuda_states(),
    )
    return msgspec.msgpack.encode(states)


def check_rng(data: bytes) -> None:
    """Raise, before anything is changed, if these are no random states: generators that nobody uses try."""
    states = unpack_random_states(data)
    try:
        version, words, gauss = states.python
        random.Random().setstate((version, tuple(array("L", words)), gauss))
        if states.numpy is not None:
            import numpy as np

            name = states.numpy[0]
            np.random.RandomState(_numpy_generator(name)()).set_state(_of_numpy(states.numpy))
        torch.Generator().set_state(_tensor(states.torch_cpu))
    except _REFUSED as error:
        raise CorruptData(f"random states of {len(data)} bytes: {error}") from error


def check_recordable() -> None:
    """Refuse generators that could be recorded and would be refused when their states come back: those of a
    torch or a numpy that is newer than this everystep may hold something else."""
    try:
        check_rng(capture_rng())
    except CorruptData as error:
        raise UnsupportedState(
            f"attach: {error}: numpy {_version('numpy')} or torch {torch.__version__} keeps random states "
            "that this everystep does not know",
            hint="upgrade everystep, or take an older numpy or torch",
        ) from error


def _version(module: str) -> str:
    return getattr(sys.modules.get(module), "__version__", "(not imported)")


def restore_rng(data: bytes) -> None:
    states = unpack_random_states(data)
    version, words, gauss = states.python
    random.setstate((version, tuple(array("L", words)), gauss))
    if states.numpy is not None:
        import numpy as np

        source: Any = np.random  # its stubs lack two functions
        name = states.numpy[0]
        _numpy_state.forget()
        if type(source.get_bit_generator()).__name__ != name:
            source.set_bit_generator(_numpy_generator(name)())
        np.random.set_state(_of_numpy(states.numpy))
    torch.set_rng_state(_tensor(states.torch_cpu))
    if torch.cuda.is_available():
        for device, state in enumerate(states.torch_cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(state), device)


def _numpy_generator(name: str) -> Any:
    """numpy's own of this name, which was checked."""
    import numpy as np

    return getattr(np.random, name)


def _of_numpy(state: tuple[str, bytes, int, int, float]) -> Any:
    import numpy as np

    name, keys, position, has_gauss, cached = state
    if name != MERSENNE:
        return values.decode(keys)
    return name, np.frombuffer(keys, np.uint32), position, has_gauss, cached


class _NumpyState:
    """numpy builds its state number by number, which takes longer than everything else of a seal. The
    memory of its generator tells whether that is needed."""

    def __init__(self) -> None:
        self._words = b""
        self._state: Any = None
        self._told = False

    def get(self) -> Any:
        numpy = sys.modules.get("numpy")
        generator: Any = numpy.random.get_bit_generator() if numpy is not None else None
        kind = type(generator).__name__
        if kind != MERSENNE:
            return None if generator is None else self._other(kind, generator)
        words = ctypes.string_at(generator.ctypes.state_address, _NUMPY_WORDS * 4)
        # the second of two normal numbers comes from a cache beside these words
        if words != self._words or self._state[3]:
            self._words, self._state = words, self._read()
        return self._state

    def forget(self) -> None:
        self._words = b""

    def _other(self, kind: str, generator: object) -> Any:
        """The user has set another kind of generator: its state is a document of numpy's."""
        import numpy as np

        known = kind in _NUMPY_GENERATORS and getattr(np.random, kind) is type(generator)
        if not known:
            if not self._told:
                self._told = True
                warnings.warn(
                    f"everystep: numpy's global generator is a {type(generator).__module__}.{kind}, none of "
                    "numpy's own: its state is not recorded",
                    stacklevel=2,
                )
            return None
        state: Any = np.random.get_state(legacy=False)
        return kind, values.encode(state, "numpy.random.get_state()"), 0, 0, 0.0

    @staticmethod
    def _read() -> Any:
        import numpy as np

        state: Any = np.random.get_state(legacy=False)
        inner = state["state"]
        return (
            MERSENNE,
            inner["key"].tobytes(),
            int(inner["pos"]),
            int(state["has_gauss"]),
            float(state["gauss"]),
        )


_numpy_state = _NumpyState()


def _cuda_states() -> tuple[bytes, ...]:
    if not torch.cuda.is_initialized():
        return ()
    return tuple(s.numpy().tobytes() for s in torch.cuda.get_rng_state_all())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
