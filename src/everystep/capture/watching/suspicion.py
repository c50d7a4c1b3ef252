"""How much of a large state is looked at for edits that leave no trace, as those through `.data` do."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("everystep")

BYTES_PER_STEP = 16 << 20  # of what is larger, a part after each step, in turn
_FIRST_SEALS = 5  # the one before the first step, and those of four steps


class Suspicion:
    """Of one kind of state. A loop that edits without a trace mostly does so from its first steps on, so all
    is looked at then. Afterwards a part will do, until an edit is found: then this program is known."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._seals_left = _FIRST_SEALS
        self._is_known = False

    @property
    def bytes_now(self) -> int:
        """So much of it is looked at after this step."""
        return sys.maxsize if self._is_known or self._seals_left else BYTES_PER_STEP

    def after_seal(self) -> None:
        self._seals_left = max(0, self._seals_left - 1)

    def confirm(self, name: str, *, late: bool) -> None:
        """An edit without a trace was found. `late`: only a part of the state was checked, so other edits may
        have been missed."""
        if late and not self._is_known:
            log.warning(
                "everystep: %s: edited in a way that leaves no trace (.data), while only a part of the %s "
                "was looked at: the records of some steps before may lack such edits. From here on "
                "everything is compared after every step. Edits under torch.no_grad(), without .data, are "
                "always noticed",
                name,
                self._kind,
            )
        self._is_known = True


class Suspicions:
    """Of one attach: what is known of a program outlives its shadow."""

    def __init__(self) -> None:
        self.weights = Suspicion("weights that no optimizer moves")
        self.slots = Suspicion("optimizer's slots")

    def after_seal(self) -> None:
        self.weights.after_seal()
        self.slots.after_seal()
