"""Documents inside of documents (user state, values of optimizers, random states), decoded without torch as
whoever loads them would decode them. Who finds a point asks here before it is chosen, and who verifies one
asks the same: what loading would refuse is passed over for something older, and told."""

from __future__ import annotations

from collections.abc import Iterable

from everystep.core.census import Census
from everystep.core.events import Call, Event, Seal, SlotValues
from everystep.errors import CorruptData
from everystep.format import foreign, values
from everystep.format.base import SessionValues
from everystep.format.optimizer import decode_values
from everystep.format.random_states import unpack_random_states


def check_session_contents(session: SessionValues, census: Census, where: str) -> None:
    try:
        _check_sealed(session, census)
        for _, _, slots in session.values:
            values.decode_dict(slots, foreign.checked_raw)
    except CorruptData as error:
        raise CorruptData(f"read {where}: session values: {error}") from error


def check_event_contents(events: Iterable[Event], census: Census, where: str) -> None:
    """Of events that were held against the census."""
    try:
        for event in events:
            if isinstance(event, Seal):
                _check_sealed(event, census)
            elif isinstance(event, Call):
                _check_groups(event.groups, census, event.optimizer)
            elif isinstance(event, SlotValues):
                values.decode_dict(event.values, foreign.checked_raw)
    except CorruptData as error:
        raise CorruptData(f"read {where}: {error}") from error


def _check_sealed(sealed: SessionValues | Seal, census: Census) -> None:
    unpack_random_states(sealed.rng)
    if sealed.state:  # what is empty says nothing
        _check_state(sealed.state)
    for optimizer, encoded in enumerate(sealed.groups):
        if encoded:
            _check_groups(encoded, census, optimizer)


def _check_state(encoded: bytes) -> None:
    members = values.decode_dict(encoded, foreign.checked_raw)
    if not all(isinstance(name, str) for name in members):
        raise CorruptData("user state under a key that is no string")


def _check_groups(encoded: bytes, census: Census, optimizer: int) -> None:
    decode_values(encoded, foreign.checked_raw, len(census.optimizers[optimizer].groups))
