"""The user's own state: anything with `state_dict` and `load_state_dict`, or a plain dict."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from everystep.capture.rng import capture_rng, restore_rng
from everystep.errors import ModelMismatch, UsageError
from everystep.format import values
from everystep.replay.tensors import pack, unpack


class UserState:
    """Owned by the training thread. Time spent in the user's `state_dict()` is counted apart."""

    def __init__(self, members: Mapping[str, Any] | None) -> None:
        self.members = dict(members or {})
        self.metric: float | None = None  # what the user reported last
        self.seconds_total = 0.0
        self.seconds_max = 0.0
        for name, member in self.members.items():
            _check_member(name, member)

    def collect(self) -> bytes:
        """Encoded state of every member; an unsupported type is refused by its path."""
        began = time.perf_counter()
        asks = any(not isinstance(member, dict) for member in self.members.values())
        random_states = capture_rng() if asks else b""
        found = {
            name: member if isinstance(member, dict) else _state_of(member)
            for name, member in self.members.items()
        }
        if asks and capture_rng() != random_states:  # a loader makes an iterator to tell its place
            restore_rng(random_states)
        spent = time.perf_counter() - began
        self.seconds_total += spent
        self.seconds_max = max(self.seconds_max, spent)
        return values.encode(found, "state", pack)

    def restore(self, encoded: bytes) -> None:
        """Give every member what it had."""
        stored = self.check(encoded)
        for name, member in self.members.items():
            if isinstance(member, dict):
                member.clear()
                member.update(stored[name])
            elif stored[name] is not None:
                member.load_state_dict(stored[name])

    def check(self, encoded: bytes) -> dict[str, Any]:
        """What is stored; members and stored names must be the same."""
        stored: dict[str, Any] = values.decode(encoded, unpack) if encoded else {}
        if set(stored) != set(self.members):
            raise ModelMismatch(
                f"restore state: the run holds {sorted(stored)}, attach was given {sorted(self.members)}",
                hint="give attach the same state={...} names as before",
            )
        return stored


def _state_of(member: Any) -> Any:
    """None for a loader that has not begun: asking would make its iterator before the user does."""
    begun = getattr(member, "_iterator", member) is not None
    waiting = getattr(member, "next_iter_state", member) is not None
    return member.state_dict() if begun or waiting else None


def _check_member(name: str, member: Any) -> None:
    if isinstance(member, dict):
        return
    if not (hasattr(member, "state_dict") and hasattr(member, "load_state_dict")):
        raise UsageError(
            f"attach: state[{name!r}] is a {type(member).__name__} without state_dict and load_state_dict",
            hint="give an object that has both (torchdata's StatefulDataLoader, schedulers, samplers), "
            "or a plain dict",
        )
    if getattr(member, "_iterator", None) is not None:
        raise UsageError(
            f"attach: state[{name!r}] already has an iterator, made before attach restored its place",
            hint="call iter(loader) after attach",
        )
