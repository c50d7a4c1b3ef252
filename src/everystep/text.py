"""What can be stored and sent as text, and shown."""

from __future__ import annotations


def is_text(value: str) -> bool:
    """Python's strings may hold halves of characters: bytes of a path that is no UTF-8, or mistakes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(words: str) -> str:
    """What cannot be printed is escaped as in Python: names may come from anywhere, and a terminal obeys some
    of them. Lines stay lines."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in words
    )
