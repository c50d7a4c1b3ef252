"""A value outside the closed set of types, refused where it was met."""

from __future__ import annotations


class Unstorable(Exception):
    """Travels up through the containers that hold the value, each of which adds its part of the path."""

    def __init__(self, words: str, hint: str) -> None:
        super().__init__(words)
        self.words = words
        self.hint = hint
        self.path = ""

    def within(self, part: str) -> None:
        self.path = part + self.path
