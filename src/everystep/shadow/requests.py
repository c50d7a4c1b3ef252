"""Requests that the shadow has heard and not yet answered."""

from __future__ import annotations

from typing import NamedTuple

from everystep.lane import control


class Waiter(NamedTuple):
    route: list[bytes]
    request: control.Request
    failures: int  # of the store, when it came
    look: int  # at the directory, which its answer has to wait for
