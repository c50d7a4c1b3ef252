"""The table of phases: what it must hold, whoever reads it."""

from __future__ import annotations

import pytest

from everystep.core.phases import TRANSITIONS, Cause, Phase, advance
from everystep.errors import CaptureError


def test_a_record_can_be_dropped_in_every_phase() -> None:
    """The one repair for everything must never be forbidden."""
    for phase in Phase:
        assert advance(phase, Cause.DROP) is not Phase.RECORDING


def test_whatever_is_dropped_is_followed_by_a_new_base() -> None:
    """No way leads from a pause to recording, nor to the end of a base, but through the base."""
    for (phase, cause), following in TRANSITIONS.items():
        if phase.pauses and following.records:
            assert (cause, following) == (Cause.REBASE, Phase.BASING)


def test_recording_can_be_reached_from_everywhere_but_an_outgrown_ring() -> None:
    for phase in Phase:
        reached = {phase}
        for _ in Phase:
            reached |= {to for (begin, _), to in TRANSITIONS.items() if begin in reached}
        assert (Phase.RECORDING in reached) == (phase is not Phase.OUTGROWN)


def test_a_phase_records_or_pauses_or_is_over() -> None:
    for phase in Phase:
        assert phase.records + phase.pauses + (phase is Phase.OUTGROWN) == 1


def test_every_cause_is_used() -> None:
    assert {cause for _, cause in TRANSITIONS} == set(Cause)


def test_what_is_not_in_the_table_is_refused() -> None:
    for phase in Phase:
        for cause in Cause:
            if (phase, cause) in TRANSITIONS:
                assert advance(phase, cause) is TRANSITIONS[phase, cause]
                continue
            with pytest.raises(CaptureError, match=f"{cause} while recording is in its") as failed:
                advance(phase, cause)
            assert "drop" in str(failed.value) and failed.value.hint
