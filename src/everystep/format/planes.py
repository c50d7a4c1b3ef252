"""Payloads as byte planes: the first bytes of all elements, then the second ones, and so on, each chunk of
them compressed by zstd. Exponents and rounded-off bits repeat themselves, mantissas do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from everystep.core.events import Event, Planes
from everystep.errors import CorruptData, StoreError

CHUNK_BYTES = 4 << 20
_LEVEL = 1  # higher ones take longer and win little

try:
    import zstandard
except ImportError:  # an extra: without it logs are written as they are
    zstandard = None  # type: ignore[assignment]


def can_pack() -> bool:
    return zstandard is not None


def check_readable(events: Sequence[Event]) -> None:
    """Refuse an entry whose payload cannot be unpacked here."""
    if events and isinstance(events[0], Planes) and not can_pack():
        raise StoreError(
            "read a log: it is compressed by zstd", hint="pip install 'everystep[zstd]'"
        )


def pack_chunk(data: memoryview, width: int) -> bytes:
    elements = np.frombuffer(bytes(data) + bytes(-len(data) % width), np.uint8).reshape(-1, width)
    return zstandard.ZstdCompressor(_LEVEL).compress(np.ascontiguousarray(elements.T).data)


def pack_planes(payload: memoryview, width: int, threads: int) -> tuple[Planes, list[bytes]]:
    chunks = [payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES)]
    packed = list(_each(partial(pack_chunk, width=width), chunks, threads))
    return Planes(len(payload), width, tuple(map(len, packed))), packed


def unpack_planes(planes: Planes, data: memoryview, threads: int) -> memoryview:
    parts = _parts(planes, data)
    whole = b"".join(_each(partial(_unpack_chunk, width=planes.width), parts, threads))
    _check_bytes(planes, len(whole))
    return memoryview(bytearray(whole))[: planes.bytes]


def check_planes(planes: Planes, data: memoryview) -> None:
    """That it can be unpacked; no more than a chunk is kept of it."""
    _check_bytes(planes, sum(len(_unpack_chunk(p, planes.width)) for p in _parts(planes, data)))


def _parts(planes: Planes, data: memoryview) -> list[memoryview]:
    ends = np.cumsum(planes.sizes).tolist()
    if not 0 < planes.width <= 16 or (ends[-1] if ends else 0) != len(data):
        raise CorruptData(f"byte planes: {len(data)} bytes, expected {ends[-1] if ends else 0}")
    if len(planes.sizes) != -(-planes.bytes // CHUNK_BYTES):
        raise CorruptData(f"byte planes: {len(planes.sizes)} chunks for {planes.bytes} bytes")
    return [data[end - size : end] for end, size in zip(ends, planes.sizes, strict=True)]


def _check_bytes(planes: Planes, found: int) -> None:
    if found < planes.bytes:
        raise CorruptData(f"byte planes: {found} bytes, expected {planes.bytes}")


def _unpack_chunk(data: memoryview, width: int) -> bytes:
    room = CHUNK_BYTES + width
    try:
        # what a frame says of itself counts for more than what it is given: memory is made for it
        if zstandard.frame_content_size(data) > room:
            raise CorruptData(f"byte planes: a chunk of more than {room} bytes")
        found = zstandard.ZstdDecompressor().decompress(data, max_output_size=room)
        return np.frombuffer(found, np.uint8).reshape(width, -1).T.tobytes()
    except (zstandard.ZstdError, ValueError) as error:
        raise CorruptData(f"byte planes: {error}") from error


def _each(
    work: Callable[[memoryview], bytes], parts: list[memoryview], threads: int
) -> Iterable[bytes]:
    if threads <= 1 or len(parts) <= 1:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(threads, "everystep-planes") as pool:
        return list(pool.map(work, parts))
