"""Between torch tensors and raw bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch

from everystep.core.dtypes import ELEMENT_TYPES
from everystep.errors import UnsupportedState

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ELEMENT_TYPES}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_name(tensor: torch.Tensor, where: str) -> str:
    name = _BY_DTYPE.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise UnsupportedState(
            f"{where}: tensors of {tensor.dtype}, {tensor.layout} cannot be stored"
        )
    return name


Payload = memoryview | torch.Tensor  # bytes of the host, or of a device


def view_tensor(data: Payload, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that lies in the given memory; nothing is copied."""
    if isinstance(data, torch.Tensor):
        return data.view(_BY_NAME[dtype]).view(shape)
    if not len(data):
        return torch.empty(shape, dtype=_BY_NAME[dtype])
    return torch.frombuffer(data, dtype=_BY_NAME[dtype]).view(shape)


def view_tensors(
    data: Payload, places: Iterable[tuple[int, str, tuple[int, ...]]]
) -> Iterator[torch.Tensor]:
    """The same for many: byte, dtype and shape of each. One operation makes one: for hundreds of parameters,
    a slice and two views each take as long as the step that needs them."""
    flat: dict[str, torch.Tensor] = {}
    for at, dtype, shape in places:
        width = ELEMENT_TYPES[dtype].bytes
        if dtype not in flat:
            whole = data[: len(data) // width * width]
            flat[dtype] = view_tensor(whole, dtype, (len(whole) // width,))
        start = flat[dtype].storage_offset() + at // width
        yield flat[dtype].as_strided(shape, _strides(shape), start)


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor that lies row by row."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; a view where its memory already is that."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def pack(value: Any) -> tuple[str, Any] | None:
    """Adapter for `values.encode`: tensors and the few other types of torch that states hold."""
    if isinstance(value, torch.Tensor):
        name = dtype_name(value, "tensor")
        return "tensor", [name, list(value.shape), bytes(raw_bytes(value)), value.device.type]
    if isinstance(value, torch.Size):
        return "size", list(value)
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", str(value)
    return None


def unpack(tag: str, payload: Any) -> Any:
    """Adapter for `values.decode`; tensors come back on the CPU, their users move them."""
    if tag == "tensor":
        name, shape, data, _ = payload
        return view_tensor(memoryview(bytearray(data)), name, tuple(shape))
    if tag == "size":
        return torch.Size(payload)
    if tag == "dtype":
        return getattr(torch, payload)
    if tag == "device":
        return torch.device(payload)
    raise KeyError(f"unknown tag {tag!r}")
