"""Between torch tensors and raw bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from everystep.core.dtypes import ELEMENT_TYPES, NAMED_TYPES, tensor_bytes
from everystep.errors import CorruptData, UnsupportedState
from everystep.format import foreign
from everystep.format.unstorable import Unstorable
from everystep.format.values import Unpack
from everystep.text import full_name

_BY_NAME: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ELEMENT_TYPES}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}
# a state may name types that no tensor of a run may have, as long as this torch has them
_ALL_DTYPES = {n: d for n in NAMED_TYPES if isinstance(d := getattr(torch, n, None), torch.dtype)}


def why_not_stored(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What is in the way of storing a tensor's elements, and what to do; None: nothing."""
    kind = type(tensor)
    if kind not in _PLAIN_TYPES:
        if is_lazy(tensor):
            return "it is not initialized yet", "run one forward before attach"
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return (
                f"a {full_name(kind)} is no plain tensor",
                "this version stores plain tensors only",
            )
    if tensor.is_meta:
        return "it is on the meta device and has no values", "initialize it on a real device first"
    if tensor.is_nested:
        return "it is a nested tensor", "store the tensors that it is made of: x.unbind()"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}, expected strided", "make it dense: x.to_dense()"
    if tensor.dtype not in _BY_DTYPE:
        known = ", ".join(_BY_NAME)
        return f"its dtype is {tensor.dtype}", f"convert it to one of {known}"
    return None


def dtype_name(tensor: torch.Tensor, where: str) -> str:
    name = _BY_DTYPE.get(tensor.dtype)
    reason = why_not_stored(tensor) if name is None or tensor.layout is not torch.strided else None
    if name is None or reason is not None:
        words, hint = reason or ("", "")
        raise UnsupportedState(f"{where}: this tensor cannot be stored: {words}", hint=hint)
    return name


def dtype_of(name: str) -> torch.dtype:
    return _BY_NAME[name]


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What `backward` makes a gradient of, unless any type is allowed."""
    return parameter.grad_dtype or parameter.dtype


def is_resolved(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its elements as they are: a lazy conjugate's does not, nor a negative's."""
    return not (tensor.is_conj() or tensor.is_neg())


Payload = memoryview | torch.Tensor  # bytes of the host, or of a device


def view_tensor(data: Payload, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that lies in the given memory; nothing is copied."""
    if isinstance(data, torch.Tensor):
        return data.view(_BY_NAME[dtype]).view(shape)
    if len(data) != tensor_bytes(dtype, shape):  # what is missing would be whatever the memory held
        raise CorruptData(f"{len(data)} bytes for a tensor {dtype}{list(shape)}")
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


def distinct(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both without what an expanded target repeats: torch writes no element twice."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return target, source


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; a view where its memory already is that."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data


def pack(value: Any) -> tuple[str, Any] | None:
    """Adapter for `values.encode`: tensors and the few other types of torch that states hold."""
    if isinstance(value, torch.Tensor):
        reason = why_not_stored(value) or _other_type(value)
        if reason is not None:
            raise Unstorable(f"this tensor cannot be stored: {reason[0]}", reason[1])
        name = _BY_DTYPE[value.dtype]
        return "tensor", [name, list(value.shape), bytes(raw_bytes(value)), value.device.type]
    if isinstance(value, torch.Size):
        return "size", list(value)
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        if name not in NAMED_TYPES:
            raise Unstorable(f"{value} cannot be stored", "store its name: str(dtype)")
        return "dtype", name
    if isinstance(value, torch.device):
        return "device", str(value)
    return None


def _other_type(tensor: torch.Tensor) -> tuple[str, str] | None:
    """A plain tensor would come back in its stead."""
    if type(tensor) in _PLAIN_TYPES:
        return None
    return f"its type is {full_name(type(tensor))}", "store x.as_subclass(torch.Tensor)"


def unpack_on(device: torch.device) -> Unpack:
    """As `unpack`, but tensors that were on a device when they were stored come back on this one."""

    def unpack_there(tag: str, payload: Any) -> Any:
        found = unpack(tag, payload)
        moves = tag == "tensor" and payload[3] != "cpu"
        return found.to(device) if moves else found

    return unpack_there


def unpack(tag: str, payload: Any) -> Any:
    """Adapter for `values.decode`; tensors come back on the CPU, their users move them."""
    foreign.check(tag, payload)
    if tag == "tensor":
        name, shape, data, _ = payload
        return view_tensor(memoryview(bytearray(data)), name, tuple(shape))
    if tag == "size":
        return torch.Size(payload)
    if tag == "dtype":
        return _ALL_DTYPES[payload]
    if tag == "device":
        return torch.device(payload)
    raise AssertionError(f"tag {tag!r} was checked")
