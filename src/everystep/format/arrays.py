"""numpy arrays and scalars to plain values and back, whatever their dtype is made of.

numpy is imported only where its values are: the shadow starts without it.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from everystep.format.unstorable import Unstorable

_OF_ARRAYS = "store np.asarray(...) of plain numbers, strings or dates"


def array_to_plain(value: Any) -> tuple[str, Any] | None:
    """Tag and payload; None if it is no value of numpy's that we know."""
    if type(value).__module__.partition(".")[0] != "numpy":
        return None
    import numpy as np

    if isinstance(value, np.generic):
        return "npscalar", [_dtype_to_plain(value.dtype), [], value.tobytes()]
    if not isinstance(value, np.ndarray):
        return None
    if type(value) is not np.ndarray:
        raise Unstorable(
            f"numpy array of type {type(value).__qualname__} cannot be stored", _OF_ARRAYS
        )
    plain = [_dtype_to_plain(value.dtype), list(value.shape)]
    if value.flags.f_contiguous and not value.flags.c_contiguous:
        return "ndarray", [*plain, value.tobytes("F"), "F"]
    return "ndarray", [*plain, value.tobytes()]


def plain_to_array(tag: str, payload: Any) -> Any:
    import numpy as np

    described, shape, data, *order = payload
    if not all(type(size) is int for size in shape):  # a product with text is more text
        raise ValueError(f"a shape of {len(shape)} that are no numbers")
    dtype = _plain_to_dtype(described)
    if tag == "npscalar" and dtype.kind in "SU":  # an array would cut zeros off its end
        return np.bytes_(data) if dtype.kind == "S" else np.str_(_utf32(data))
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} and dtype {dtype}")
    found = np.ndarray(shape, dtype, order="F" if order else "C")
    if data:  # byte by byte: a copy of fields would leave out what lies between them
        found.ravel("K").view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return found if tag == "ndarray" else found[()]


def _utf32(data: bytes) -> str:
    return data.decode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")


def _dtype_to_plain(dtype: Any) -> Any:
    """Its code, or for fields and sub-arrays a description that names everything but the bytes."""
    import numpy as np

    if dtype.hasobject:
        raise Unstorable(
            f"numpy dtype {dtype} holds Python objects, which cannot be stored", _OF_ARRAYS
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _dtype_to_plain(base), "shape": list(shape)}
    if dtype.names is None:
        known = np.dtype(dtype.str)
        if known != dtype or known.type is not dtype.type:
            raise Unstorable(
                f"numpy dtype {dtype} is not numpy's own and cannot be stored", _OF_ARRAYS
            )
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_dtype_to_plain(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [_title(field) for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
        "record": dtype.type is np.record,
    }


def _title(field: tuple[Any, ...]) -> str | None:
    title = field[2] if len(field) > 2 else None
    if title is not None and type(title) is not str:
        raise Unstorable(
            f"a numpy field titled {title!r} cannot be stored", "title it with a string"
        )
    return title


def _plain_to_dtype(plain: Any) -> Any:
    import numpy as np

    if isinstance(plain, str):
        return np.dtype(plain)
    if "base" in plain:
        return np.dtype((_plain_to_dtype(plain["base"]), tuple(plain["shape"])))
    layout: Any = {name: plain[name] for name in ("names", "offsets", "itemsize")}
    layout["formats"] = [_plain_to_dtype(inner) for inner in plain["formats"]]
    if any(plain["titles"]):
        layout["titles"] = plain["titles"]
    found = np.dtype(layout, align=plain["aligned"])
    return np.dtype((np.record, found)) if plain["record"] else found


def widen_bfloat16(bits: Any) -> Any:
    """The elements, an array of their 16 bits each, as float32: the upper half of it. No value changes."""
    import numpy as np

    return (bits.astype(np.uint32) << 16).view(np.float32)
