"""What can be stored and sent as text."""

from __future__ import annotations


def is_text(value: str) -> bool:
    """Python's strings may hold halves of characters: bytes of a path that is no UTF-8, or mistakes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
