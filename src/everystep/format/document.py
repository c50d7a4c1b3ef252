"""Small JSON documents under a checksum: one header line, then the body.

everystep <kind> <version> <body bytes> <xxh3-128 of kind, version and body>\\n<body>
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

from everystep.errors import CorruptData, UnknownVersion

VERSION = 1
_MAGIC = b"everystep"

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
    if version.isdigit() and int(version) > VERSION and not flipped:
        raise UnknownVersion(
            f"read {where}: format version {version}, this everystep knows up to {VERSION}",
            hint="upgrade everystep to the version that wrote this run",
        )
    if digest != _digest(f"{found} {version} {length}", body):
        raise CorruptData(f"read {where}: checksum does not match the content")
    if found != kind or length != str(len(body)):
        raise CorruptData(f"read {where}: a {found} of {length} bytes, expected a {kind}")
    try:
        return msgspec.json.decode(body, type=type)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptData(f"read {where}: {error}") from error


def _digest(head: str, body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(head.encode() + b"\n" + body)
