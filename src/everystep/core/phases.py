"""The phases of recording into one ring, and what leads from one to the next.

`TRANSITIONS` is all there is: what it does not list is forbidden.
"""

from __future__ import annotations

from enum import StrEnum

from everystep.errors import CaptureError


class Phase(StrEnum):
    OPENING = "opening"  # nothing is sealed yet
    BASING = "basing"  # every step is recorded, and a base has still to be sent
    RECORDING = "recording"  # every step is recorded, and all that it stands on is sent
    DROPPING = "dropping"  # steps are dropped until the shadow asks for a new base
    RESTING = "resting"  # no step is wanted until the next base is due
    OUTGROWN = "outgrown"  # training does not fit this ring any more: another one is needed

    @property
    def records(self) -> bool:
        return self in (Phase.OPENING, Phase.BASING, Phase.RECORDING)

    @property
    def pauses(self) -> bool:
        return self in (Phase.DROPPING, Phase.RESTING)


class Cause(StrEnum):
    SEAL = "seal"  # a seal is sent; a part of a base is left
    COMPLETE = "complete"  # a seal is sent with all that it stands on
    REBASE = "rebase"  # the shadow asks for a base, or what was sent cannot be trusted
    DROP = "drop"  # the ring was full, state changed while it was copied, or a seal was interrupted
    REST = "rest"  # a base is sent, and the next one is not due yet
    WAKE = "wake"  # a base is due, or somebody waits for one
    OUTGROW = "outgrow"  # the census is no longer true, or a record is too large for a slot


TRANSITIONS = {
    (Phase.OPENING, Cause.SEAL): Phase.BASING,
    (Phase.OPENING, Cause.COMPLETE): Phase.RECORDING,
    (Phase.OPENING, Cause.REBASE): Phase.OPENING,
    (Phase.OPENING, Cause.DROP): Phase.DROPPING,
    (Phase.OPENING, Cause.OUTGROW): Phase.OUTGROWN,
    (Phase.BASING, Cause.SEAL): Phase.BASING,
    (Phase.BASING, Cause.COMPLETE): Phase.RECORDING,
    (Phase.BASING, Cause.REBASE): Phase.BASING,
    (Phase.BASING, Cause.DROP): Phase.DROPPING,
    (Phase.BASING, Cause.OUTGROW): Phase.OUTGROWN,
    (Phase.RECORDING, Cause.COMPLETE): Phase.RECORDING,
    (Phase.RECORDING, Cause.REBASE): Phase.BASING,
    (Phase.RECORDING, Cause.DROP): Phase.DROPPING,
    (Phase.RECORDING, Cause.REST): Phase.RESTING,
    (Phase.RECORDING, Cause.OUTGROW): Phase.OUTGROWN,
    (Phase.DROPPING, Cause.REBASE): Phase.BASING,
    (Phase.DROPPING, Cause.DROP): Phase.DROPPING,
    (Phase.DROPPING, Cause.OUTGROW): Phase.OUTGROWN,
    (Phase.RESTING, Cause.WAKE): Phase.DROPPING,
    (Phase.RESTING, Cause.DROP): Phase.RESTING,
    (Phase.RESTING, Cause.OUTGROW): Phase.OUTGROWN,
    (Phase.OUTGROWN, Cause.DROP): Phase.OUTGROWN,
}


def advance(phase: Phase, cause: Cause) -> Phase:
    """The phase that follows; CaptureError where none does."""
    following = TRANSITIONS.get((phase, cause))
    if following is None:
        raise CaptureError(
            f"record: {cause!s} while recording is in its phase {phase!s}, expected one of "
            f"{', '.join(sorted(c for p, c in TRANSITIONS if p is phase))}",
            hint="recording goes on with a new base; please report what led to this",
        )
    return following
