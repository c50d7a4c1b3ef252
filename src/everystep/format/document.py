"""Small JSON documents under a checksum: one header line, then the body.

everystep <kind> <version> <body bytes> <xxh3-128 of kind, version and body>\\n<body>
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

from everystep.errors import CorruptData, UnknownVersion

VERSION = 2
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises where bytes are no document of this kind."""
_MAGIC = b"everystep"
_DIGITS_MAX = 9  # of a version: more of them are no version of ours

T = TypeVar("T")


def pack_document(kind: str, value: object) -> bytes:
    body = msgspec.json.format(msgspec.json.encode(value), indent=1)
    head = f"{kind} {VERSION} {len(body)}"
    return f"everystep {head} {_digest(head, body)}\n".encode() + body


def unpack_document(kind: str, data: bytes, type: type[T], where: str) -> T:
    """The value of a document, after its version and every byte have been checked."""
    line, newline, body = data.partition(b"\n")
    words = line.split(b" ")
    if not newline or len(words) != 5 or words[0] != _MAGIC:
        raise CorruptData(f"read {where}: no everystep header line")
    found, version, length, digest = (word.decode("ascii", "replace") for word in words[1:])
    # a flipped bit can make a newer version of ours: with the number put right, its checksum matches
    flipped = digest == _digest(f"{found} {VERSION} {length}", body)
    newer = version.isdecimal() and len(version) <= _DIGITS_MAX and int(version) > VERSION
    if newer and not flipped:
        raise UnknownVersion(
            f"read {where}: format version {version}, this everystep knows up to {VERSION}",
            hint="upgrade everystep to the version that wrote this run",
        )
    if digest != _digest(f"{found} {version} {length}", body):
        raise CorruptData(f"read {where}: checksum does not match the content")
    if _is_older(version):
        raise UnknownVersion(
            f"read {where}: format version {version}, this everystep knows {VERSION}",
            hint="it was written before the first release: go on with the everystep that wrote it, or begin "
            "in another directory",
        )
    if (found, version, length) != (kind, str(VERSION), str(len(body))):
        told = f"a {found} {version:.{_DIGITS_MAX}} of {length:.20} bytes"
        raise CorruptData(f"read {where}: {told}, expected a {kind} {VERSION} of {len(body)}")
    try:
        return msgspec.json.decode(body, type=type)
    except MALFORMED as error:
        raise CorruptData(f"read {where}: {error}") from error


def _is_older(version: str) -> bool:
    return version in map(str, range(1, VERSION))


def _digest(head: str, body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(head.encode() + b"\n" + body)
