"""Ways to say a gradient with fewer bits: what goes over the wire, and what the other side makes of it.

All of them work on a flat tensor, on its device and without waiting for it. The same bits in give the same
bits out, so replay gives every bit of the step.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

_BLOCK = 32  # values that share a scale


class Method(Protocol):
    """`decode(encode(x), len(x))` is what training goes on with. Tensors that are encoded together begin at
    multiples of `block`, so that none shares a scale with its neighbour."""

    @property
    def block(self) -> int: ...

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors whose shapes depend on the length of `flat` alone."""

    def decode(
        self, wire: tuple[torch.Tensor, ...], size: int, dtype: torch.dtype
    ) -> torch.Tensor: ...


class TopK(NamedTuple):
    """The largest magnitudes, exactly ceil(ratio * n) of them; of equal ones those that come first."""

    ratio: float
    block: int = 1

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = math.ceil(self.ratio * len(flat))
        if not count:
            return flat.new_empty(0, dtype=torch.int32), flat
        size = (
            flat.abs().float().view(torch.int32)
        )  # ordered as magnitudes are; a NaN is the largest
        least = size.topk(count, sorted=False).values.amin()
        larger, equal = size > least, size == least
        room = count - larger.sum(dtype=torch.int32)
        chosen = larger | (equal & (equal.cumsum(0, dtype=torch.int32) <= room))
        places = torch.nonzero_static(chosen, size=count).view(-1)
        return _short(places, len(flat)), flat[places]

    def decode(self, wire: tuple[torch.Tensor, ...], size: int, dtype: torch.dtype) -> torch.Tensor:
        return _scatter(wire, size)


class RandomK(NamedTuple):
    """ceil(ratio * n) places, drawn with torch's own generator: its state is part of every checkpoint."""

    ratio: float
    block: int = 1

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = math.ceil(self.ratio * len(flat))
        places = torch.randint(max(1, len(flat)), (count,), device=flat.device)
        return _short(places, len(flat)), flat[places]

    def decode(self, wire: tuple[torch.Tensor, ...], size: int, dtype: torch.dtype) -> torch.Tensor:
        return _scatter(wire, size)


class Blocks(NamedTuple):
    """Eight bits a value and, for every 32 of them, a scale that is a power of two."""

    kind: torch.dtype  # int8 or float8_e4m3fn
    bits: int  # the largest magnitude of a block lies between 2^bits and 2^(bits + 1)
    block: int = _BLOCK

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = torch.nn.functional.pad(flat.float(), (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
        largest = padded.abs().amax(1, keepdim=True)
        exponent = largest.frexp().exponent - 1 - self.bits
        scaled = torch.ldexp(padded, -exponent)
        if self.kind == torch.int8:
            scaled = scaled.round().clamp(-127, 127)
        # what is not finite must be seen: the scale says so for the whole block
        exponent = torch.where(largest.isfinite(), exponent, _NOT_FINITE)
        return scaled.to(self.kind).view(torch.int8), exponent.to(torch.int16)

    def decode(self, wire: tuple[torch.Tensor, ...], size: int, dtype: torch.dtype) -> torch.Tensor:
        values, exponent = wire
        whole = torch.ldexp(values.view(self.kind).float(), exponent.int())
        whole = torch.where(exponent == _NOT_FINITE, math.nan, whole)
        return whole.view(-1)[:size].to(dtype)


class Bfloat16(NamedTuple):
    block: int = 1

    def encode(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (flat.to(torch.bfloat16, copy=True),)  # the caller goes on to change its own

    def decode(self, wire: tuple[torch.Tensor, ...], size: int, dtype: torch.dtype) -> torch.Tensor:
        return wire[0].to(dtype)


_NOT_FINITE = 1 << 14

INT8 = Blocks(torch.int8, 6)
FP8 = Blocks(torch.float8_e4m3fn, 7)


def _short(places: torch.Tensor, size: int) -> torch.Tensor:
    return places.int() if size < 1 << 31 else places


def _scatter(wire: tuple[torch.Tensor, ...], size: int) -> torch.Tensor:
    places, values = wire
    full = values.new_zeros(size)
    full[places.long()] = values
    return full
