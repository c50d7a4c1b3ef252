"""What processes of one run say to each other has a version: a shadow may be older or newer than who asks it.

Messages of another version are never guessed at. What stays the same over all versions is little, and
docs/FORMAT.md writes it down: the card's pid, start and protocol, and SIGTERM, which asks for last words.
"""

from __future__ import annotations

import msgspec

# raise it when a message or its meaning changes; a test knows the messages of each number
PROTOCOL = 8
NOT_UNDERSTOOD = (ValueError, RecursionError)  # what decoding raises, whatever the bytes are


class Head(msgspec.Struct, frozen=True):
    """What every message of every version has; 0 is before there were versions."""

    type: str = ""
    protocol: int = 0


def head_of(message: bytes) -> Head:
    """Of a message that may be anything at all."""
    try:
        return msgspec.msgpack.decode(message, type=Head)
    except NOT_UNDERSTOOD:
        return Head()


def versions(who: str, theirs: int) -> str:
    return f"{who} speaks protocol {theirs}, this everystep speaks {PROTOCOL}"
