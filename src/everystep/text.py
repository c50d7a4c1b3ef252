"""What can be stored and sent as text, and shown."""

from __future__ import annotations

import re

_HOST_END, _BEHIND_PATH = re.compile("[/?#]"), re.compile("[?#]")


_SWITCHES = dict.fromkeys(("1", "true", "yes", "on"), True)
_SWITCHES |= dict.fromkeys(("0", "false", "no", "off"), False)


def switch(words: str) -> bool | None:
    """What a variable says that turns something on or off; None: that is not understood."""
    return _SWITCHES.get(words.strip().lower())


def is_text(value: str) -> bool:
    """Python's strings may hold halves of characters: bytes of a path that is no UTF-8, or mistakes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def full_name(kind: type, mark: str = ".") -> str:
    """Of a class: in words with a dot, in census and store with a colon."""
    return f"{kind.__module__}{mark}{kind.__qualname__}"


def printable(words: str) -> str:
    """What cannot be printed is escaped as in Python: names may come from anywhere, and a terminal obeys some
    of them. Lines stay lines."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in words
    )


def redacted(words: str) -> str:
    """A URL as it may be shown and logged: without user, password, token and what else somebody put there. Of
    one that may be read in several ways rather too little is shown: secrets hold '/', '?', '#' and '@', too.
    Words that are no URL stay as they are."""
    scheme, mark, rest = words.partition("://")
    if not mark:
        return words
    if re.search("[@:]", _HOST_END.split(rest, 1)[0]):
        rest = rest.rpartition("@")[2]
    return f"{scheme.lower()}://{_BEHIND_PATH.split(rest, 1)[0]}".rstrip("/")
