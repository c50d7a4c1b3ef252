"""The element types a run may hold, by torch's name without `torch.`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class ElementType(NamedTuple):
    """`code` is the type's name in a safetensors header."""

    bytes: int
    code: str


ELEMENT_TYPES: dict[str, ElementType] = {
    "bool": ElementType(1, "BOOL"),
    "uint8": ElementType(1, "U8"),
    "int8": ElementType(1, "I8"),
    "uint16": ElementType(2, "U16"),
    "int16": ElementType(2, "I16"),
    "uint32": ElementType(4, "U32"),
    "int32": ElementType(4, "I32"),
    "uint64": ElementType(8, "U64"),
    "int64": ElementType(8, "I64"),
    "float8_e4m3fn": ElementType(1, "F8_E4M3"),
    "float8_e5m2": ElementType(1, "F8_E5M2"),
    "float16": ElementType(2, "F16"),
    "bfloat16": ElementType(2, "BF16"),
    "float32": ElementType(4, "F32"),
    "float64": ElementType(8, "F64"),
    "complex64": ElementType(8, "C64"),
}

# every name of torch's types, its aliases included: a state may hold the type itself
NAMED_TYPES = frozenset(
    {
        *ELEMENT_TYPES,
        *(
            "short",
            "int",
            "long",
            "half",
            "float",
            "double",
            "chalf",
            "cfloat",
            "cdouble",
            "complex32",
            "complex128",
        ),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *(
            "bit",
            "bits8",
            "bits16",
            "bits1x8",
            "bits2x4",
            "bits4x2",
            "qint8",
            "qint32",
            "quint8",
            "quint2x4",
            "quint4x2",
        ),
        *(
            "int1",
            "int2",
            "int3",
            "int4",
            "int5",
            "int6",
            "int7",
            "uint1",
            "uint2",
            "uint3",
            "uint4",
            "uint5",
            "uint6",
            "uint7",
        ),
    }
)


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return ELEMENT_TYPES[dtype].bytes * math.prod(shape)
