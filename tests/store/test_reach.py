"""Which steps a run can be taken back to is told by who refuses one."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystep.core.retention import Rules
from everystep.errors import StepUnavailable
from everystep.recover.find import find_newest
from everystep.store.reach import listed, stretches
from everystep.store.reader import StoredRun
from everystep.store.term import TermWriter

from .test_retention import snapshot
from .test_zombies import log_of, record


def test_a_step_that_is_gone_names_those_that_are_there(tmp_path: Path) -> None:
    """Bases 1, 5, 9, records of 2, 3, 10 and 11: each of these steps can be had, and no other one."""
    writer = TermWriter(tmp_path, None, Rules(9))
    for base, logged in ((1, (2, 3)), (5, ()), (9, (10, 11))):
        writer.commit(snapshot(base))
        if logged:
            log_of(tmp_path, writer).append([record(step) for step in logged])
    there = [s for s in range(15) if _can_be_had(tmp_path, s)]
    assert there == [1, 2, 3, 5, 9, 10, 11]
    with pytest.raises(StepUnavailable) as refusal:
        find_newest(tmp_path, None, 7)
    told = str(refusal.value)
    assert "newest, 11;" in told and "bases of steps 1, 5, 9;" in told
    assert "every step from 1 to 3, from 9 to 11" in told
    assert "durable_log=1" in told and "Keep(last=…, every=…)" in told and "durable_every" in told
    with pytest.raises(StepUnavailable, match=r"bases of steps 1, 5, 9;.*restore"):
        StoredRun(tmp_path).base(7)


def _can_be_had(run: Path, step: int) -> bool:
    try:
        found, _ = find_newest(run, None, step)
    except StepUnavailable:
        return False
    return found is not None and found.point.step == step


def test_a_run_without_a_base_says_so(tmp_path: Path) -> None:
    TermWriter(tmp_path, None, Rules())
    with pytest.raises(StepUnavailable, match="no step to go back to"):
        find_newest(tmp_path, None, 7)


def test_long_lists_are_short() -> None:
    assert stretches([3, 1, 2, 7, 9, 8]) == [(1, 3), (7, 9)]
    assert listed(map(str, range(40))).endswith("39 (and 28 older ones)")
