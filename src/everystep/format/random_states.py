"""Checks stored random states before a generator gets them: with a bad state, some generators read memory out
of bounds. No generator is used for that, and torch is not imported: `everystep verify` finds what loading
would refuse."""

from __future__ import annotations

import math
import struct
from array import array
from typing import Annotated, Any, Literal

import msgspec

from everystep.errors import CorruptData
from everystep.format import values
from everystep.format.document import MALFORMED

_WORDS = 624  # of a Mersenne twister; its position lies behind the last one when all were drawn
_BYTES_MAX = 1 << 18  # of all states: a Mersenne twister has 2500, a CUDA device 16
_NOT_OURS = (*MALFORMED, CorruptData, ValueError, TypeError, LookupError, AttributeError)

MERSENNE = "MT19937"
Numpys = Literal["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]
_Position = Annotated[int, msgspec.Meta(ge=0, le=_WORDS)]
_Flag = Annotated[int, msgspec.Meta(ge=0, le=1)]


class RandomStates(msgspec.Struct, frozen=True, array_like=True):
    """numpy's: name, words, position, whether a normal number is kept aside, and which. Of a generator that
    is no Mersenne twister, the document that numpy makes of it stands in place of the words."""

    python: tuple[Literal[3], bytes, float | None]
    numpy: tuple[Numpys, bytes, _Position, _Flag, float] | None
    torch_cpu: bytes
    torch_cuda: tuple[bytes, ...]


_decoder = msgspec.msgpack.Decoder(RandomStates)


def unpack_random_states(data: bytes) -> RandomStates:
    """CorruptData if they are no states, or if drawing from one could read what is not its own."""
    try:
        if len(data) > _BYTES_MAX:
            raise ValueError(f"expected at most {_BYTES_MAX}")
        states = _decoder.decode(data)
        _check_python(*states.python)
        if states.numpy is not None:
            _check_numpy(*states.numpy)
        _check_torch(states.torch_cpu)
        for state in states.torch_cuda:
            _check_cuda(state)
    except _NOT_OURS as error:
        raise CorruptData(f"random states of {len(data)} bytes: {error}") from error
    return states


def _expect(right: bool, found: str) -> None:
    if not right:
        raise ValueError(found)


# ---------------------------------------------------------------------- python and numpy


def _check_python(version: int, data: bytes, gauss: float | None) -> None:
    words = array("L")
    _expect(len(data) == (_WORDS + 1) * words.itemsize, f"python's has {len(data)} bytes")
    words.frombytes(data)
    _expect(max(words[:_WORDS]) < 1 << 32, f"python's has a word {max(words[:_WORDS])}")
    _expect(words[_WORDS] <= _WORDS, f"python's is at word {words[_WORDS]} of {_WORDS}")
    _expect(gauss is None or math.isfinite(gauss), f"python's keeps {gauss}")


def _check_numpy(name: str, data: bytes, position: int, has_gauss: int, gauss: float) -> None:
    _expect(math.isfinite(gauss), f"numpy's keeps {gauss}")
    if name == MERSENNE:
        _expect(len(data) == 4 * _WORDS, f"numpy's has {len(data)} bytes")
    else:
        _check_document(name, values.decode(data))


_U32, _U64, _U128 = ((1 << bits) - 1 for bits in (32, 64, 128))
_BESIDE = {"has_uint32": 1, "uinteger": _U32, "has_gauss": 1}  # the largest that each may be
_NUMBERS = {
    "PCG64": {"state": _U128, "inc": _U128},
    "PCG64DXSM": {"state": _U128, "inc": _U128},
    "Philox": {},
    "SFC64": {},
}
_PHILOX_BUFFER = 4  # words; its position is behind the last one when all were drawn
_ARRAYS = {"Philox": {"counter": 4, "key": 2}, "SFC64": {"state": 4}}


def _check_document(name: str, document: Any) -> None:
    """What numpy tells of a generator that is no Mersenne twister."""
    _expect(document["bit_generator"] == name, f"a {name} that is a {document['bit_generator']!r}")
    gauss = document["gauss"]
    _expect(type(gauss) is float and math.isfinite(gauss), f"a {name} that keeps {gauss!r}")
    for owner, numbers in ((document, _BESIDE), (document["state"], _NUMBERS[name])):
        for key, most in numbers.items():
            _check_number(owner[key], most, f"a {name} with {key}")
    for key, count in _ARRAYS.get(name, {}).items():
        _check_words(document["state"][key], count, f"a {name} with {key}")
    if name == "Philox":
        _check_words(document["buffer"], _PHILOX_BUFFER, "a Philox with buffer")
        _check_number(document["buffer_pos"], _PHILOX_BUFFER, "a Philox with buffer_pos")


def _check_number(number: Any, most: int, what: str) -> None:
    _expect(type(number) is int and 0 <= number <= most, f"{what} {number!r:.60}")


def _check_words(words: Any, count: int, what: str) -> None:
    import numpy as np

    right = type(words) is np.ndarray and words.dtype == np.uint64 and words.shape == (count,)
    _expect(right, f"{what} that is not {count} words")


# ---------------------------------------------------------------------- torch

# seed, how many words are left until new ones are made, whether it was seeded, the next word
_TORCH_HEAD = struct.Struct("<QiiQ")
_TORCH_NORMALS = struct.Struct("<3di4xfB3x")  # x, y, rho, which counts; a float, whether it counts
_TORCH_NORMALS_AT = _TORCH_HEAD.size + 8 * _WORDS
_TORCH_BYTES = _TORCH_NORMALS_AT + _TORCH_NORMALS.size
_CUDA = struct.Struct("<QQ")  # seed, offset
_CUDA_TURN = 4  # numbers are made so many at a time, and the offset is that of the next ones


def _check_torch(data: bytes) -> None:
    """torch's own check lets it begin in the middle of its words and still draw as many as there are."""
    _expect(len(data) == _TORCH_BYTES, f"torch's has {len(data)} bytes, expected {_TORCH_BYTES}")
    _, left, seeded, following = _TORCH_HEAD.unpack_from(data)
    inside = 1 <= left <= _WORDS and following + left <= _WORDS + 1
    _expect(inside and seeded == 1, f"torch's is at word {following}, {left} are left")
    *kept, counts, single, single_counts = _TORCH_NORMALS.unpack_from(data, _TORCH_NORMALS_AT)
    _expect(counts in (0, 1) and single_counts in (0, 1), "torch's keeps what is no number")
    kept = [*kept * counts, *[single] * single_counts]
    _expect(all(map(math.isfinite, kept)), f"torch's keeps {kept}")


def _check_cuda(data: bytes) -> None:
    _expect(len(data) == _CUDA.size, f"a CUDA device's has {len(data)} bytes")
    _, offset = _CUDA.unpack(data)
    _expect(offset % _CUDA_TURN == 0, f"a CUDA device's is at {offset}")
