"""What is trained, and where it stands between two seals. It outlives taps, rings and shadows."""

from __future__ import annotations

import msgspec

from everystep.capture.census import LiveCensus, Models, Optimizers, take_census
from everystep.capture.groups import encode_groups
from everystep.capture.state import UserState
from everystep.capture.turn import OpenTurn, SealedValues
from everystep.capture.watching.suspicion import Suspicions
from everystep.core.census import Script


class Subject:
    """Models, optimizers and user state of one attach. Owned by the training thread."""

    def __init__(
        self,
        models: Models,
        optimizers: Optimizers,
        user_state: UserState,
        *,
        log: bool,
        override: tuple[str, ...],
    ) -> None:
        self.user_state = user_state
        self.turn = OpenTurn()
        self.suspicions = Suspicions()
        self._live: LiveCensus | None = None
        self._models, self._optimizers = models, optimizers
        self._log, self._override = log, override
        self._script: Script | None = None

    def census(self) -> LiveCensus:
        live = take_census(self._models, self._optimizers, log=self._log)
        if self._script is None:  # at attach, before anything is loaded
            self._script = Script(encode_groups(live.keyed), self._override)
            self.turn.count(live.optimizers)
        live.census = msgspec.structs.replace(live.census, script=self._script)
        self._live = live
        return live

    @property
    def live(self) -> LiveCensus:
        """The last census."""
        return self._live if self._live is not None else self.census()

    def sealed_values(self, rng: bytes | None = None) -> SealedValues:
        """What a seal says now. `rng`: random states that are not restored yet."""
        return SealedValues.now(self.user_state, self.live, rng)

    def look(self) -> None:
        """Remember how a seal looks that is not recorded, and may have to be."""
        self.turn.look(self.live)
