"""The user's own state: anything with `state_dict` and `load_state_dict`, or a plain dict."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from everystep.capture.rng import capture_rng, restore_rng
from everystep.errors import ModelMismatch, RecoveryError, UsageError
from everystep.format import values
from everystep.replay.tensors import pack, unpack
from everystep.text import is_text
from everystep.unwrap import unwrap


class UserState:
    """Owned by the training thread. Time spent in the user's `state_dict()` is counted apart."""

    def __init__(self, members: Mapping[str, Any] | None) -> None:
        if members is not None and not isinstance(members, Mapping):
            raise UsageError(
                f"attach: state is a {type(members).__name__}, expected a mapping of names to objects",
                hint='state={"loader": loader, "schedule": schedule}',
            )
        self.members = {name: unwrap(member) for name, member in dict(members or {}).items()}
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
        found = {name: _state_of(name, member) for name, member in self.members.items()}
        if asks and capture_rng() != random_states:  # a loader makes an iterator to tell its place
            restore_rng(random_states)
        spent = time.perf_counter() - began
        self.seconds_total += spent
        self.seconds_max = max(self.seconds_max, spent)
        plain = {n: values.to_plain(found[n], f"state[{n!r}]", pack) for n in found}
        return values.encode_dict(plain)

    def restore(self, encoded: bytes) -> None:
        """Give every member what it had."""
        stored = self.check(encoded)
        for name, member in self.members.items():
            if isinstance(member, dict):
                member.clear()
                member.update(stored[name])
            elif stored[name] is not None:
                _load(name, member, stored[name])

    def check(self, encoded: bytes) -> dict[str, Any]:
        """What is stored; members and stored names must be the same."""
        stored: dict[str, Any] = values.decode(encoded, unpack) if encoded else {}
        if set(stored) != set(self.members):
            raise ModelMismatch(
                f"restore state: the run holds {sorted(stored)}, attach was given {sorted(self.members)}",
                hint="give attach the same state={...} names as before",
            )
        return stored


def has_state(member: Any) -> bool:
    """Whether its `state_dict` and `load_state_dict` work. accelerate's loader has both in any case."""
    both = hasattr(member, "state_dict") and hasattr(member, "load_state_dict")
    return both and bool(getattr(member, "use_stateful_dataloader", True))


def _state_of(name: str, member: Any) -> Any:
    """None for a loader that has not begun: asking would make its iterator before the user does."""
    if isinstance(member, dict):
        return member
    begun = getattr(member, "_iterator", member) is not None
    waiting = getattr(member, "next_iter_state", member) is not None
    try:
        return member.state_dict() if begun or waiting else None
    except Exception as error:
        raise UsageError(
            f"record state[{name!r}]: its state_dict() raised {type(error).__name__}: {error}",
            hint="it is called at attach and at every seal: it must work at any of them",
        ) from error


def _load(name: str, member: Any, stored: Any) -> None:
    try:
        member.load_state_dict(stored)
    except Exception as error:
        raise RecoveryError(
            f"resume state[{name!r}]: load_state_dict() of this {type(member).__name__} raised "
            f"{type(error).__name__}: {error}",
            hint="build it as it was when the run was recorded: it is given what its own state_dict() "
            "returned then, and everystep.open_run(run).state() shows that",
        ) from error


def _check_member(name: str, member: Any) -> None:
    if not isinstance(name, str) or not is_text(name):
        raise UsageError(
            f"attach: state under the key {values.shown(name)}, expected a string",
            hint='state={"loader": loader, "schedule": schedule}',
        )
    if isinstance(member, dict):
        return
    if not has_state(member):
        loader = hasattr(member, "dataset") and hasattr(member, "batch_sampler")
        raise UsageError(
            f"attach: state[{name!r}] is a {type(member).__name__} without state_dict and load_state_dict",
            hint="give everystep.data(loader), and draw batches from that; or use torchdata's "
            "StatefulDataLoader"
            if loader
            else "give an object that has both (everystep.data of a loader, schedulers, samplers), "
            "or a plain dict",
        )
    if getattr(member, "_iterator", None) is not None:
        raise UsageError(
            f"attach: state[{name!r}] already has an iterator, made before attach restored its place",
            hint="call iter(loader) after attach",
        )
