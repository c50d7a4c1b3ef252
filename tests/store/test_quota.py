"""A quota is never exceeded by more than documents take; the newest base and what tags pin stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from states import random_states

from everystep.core.events import Seal
from everystep.core.limits import Limits
from everystep.core.retention import Rules
from everystep.errors import NotEnoughDisk
from everystep.format.log import BLOCK_BYTES
from everystep.shadow.logkeeper import LogKeeper
from everystep.store.disk.meter import Meter, directory_bytes
from everystep.store.runs import read_lineage
from everystep.store.snapshot import new_bytes
from everystep.store.tags import remove_tag, set_tag
from everystep.store.term import TermWriter
from everystep.store.verify import verify_run

from .test_retention import CENSUS, snapshot
from .test_zombies import log_of, record

_RECORD_BYTES = -(-len(record(1).body) // BLOCK_BYTES) * BLOCK_BYTES  # with a head it still fits


def steps(run: Path) -> list[int]:
    return [candidate.entry.step for candidate in read_lineage(run).candidates]


@pytest.mark.parametrize("bases", [2, 3, 5])
def test_older_bases_go_early(bases: int, tmp_path: Path) -> None:
    run, need = tmp_path / "run", new_bytes(snapshot(1), None)
    quota = bases * need
    writer = TermWriter(run, None, Rules(9), meter=Meter(Limits(store_quota=quota)))
    for step in range(1, 12):
        writer.commit(snapshot(step, thawed=step))
        assert directory_bytes(run) <= quota
        writer.apply_retention()
        assert verify_run(run).problems == [] and steps(run)[0] == step
    assert len(steps(run)) >= bases - 1, "no more go than have to"


def test_what_has_to_stay_stays_and_the_option_is_named(tmp_path: Path) -> None:
    run, need = tmp_path / "run", new_bytes(snapshot(1), None)
    writer = TermWriter(run, None, Rules(9), meter=Meter(Limits(store_quota=2 * need)))
    last, refused = 0, ""
    for step in range(1, 40):
        try:
            writer.commit(snapshot(step, thawed=step))
        except NotEnoughDisk as error:
            refused = str(error)
            break
        last = step
        set_tag(run, f"precious-{step}", step)
    assert "store_quota" in refused and "tags" in refused
    assert directory_bytes(run) <= 2 * need
    assert steps(run) == list(range(last, 0, -1)), "every one is pinned"
    assert verify_run(run).problems == []
    for step in (1, 2):
        remove_tag(run, f"precious-{step}")
    writer.commit(snapshot(last + 1, thawed=last + 1))
    assert steps(run)[0] == last + 1 and 1 not in steps(run) and 3 in steps(run)


def test_the_log_of_bases_that_go_early_goes_with_them(tmp_path: Path) -> None:
    run, need = tmp_path / "run", new_bytes(snapshot(1), None)
    meter = Meter(Limits(store_quota=2 * need + 3 * (8192 + _RECORD_BYTES)))
    writer = TermWriter(run, None, Rules(9), meter=meter)
    logged = log_of(run, writer)
    for step in range(1, 20, 2):
        writer.commit(snapshot(step, thawed=step))
        writer.apply_retention()
        logged.close()
        logged.append([record(step + 1)])
        assert directory_bytes(run) <= meter.limits.store_quota
    assert steps(run)[0] == 19 and len(steps(run)) < 10
    report = verify_run(run)
    assert report.problems == [] and report.log_step == 20


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_log_that_was_refused_goes_with_a_base_and_goes_on(
    keep_last: int, tmp_path: Path
) -> None:
    """No segment can be begun behind it, so nothing but its writer tells that it may go."""
    run, need = tmp_path / "run", new_bytes(snapshot(1), None)
    meter = Meter(Limits(store_quota=(keep_last + 1) * need + 8 * (8192 + _RECORD_BYTES)))
    log_keeper = LogKeeper(run, CENSUS, 1, meter)
    writer = TermWriter(run, None, Rules(keep_last), meter=meter, ended_log=log_keeper.ended)
    bases = refused = 0

    def base(step: int) -> None:
        writer.commit(snapshot(step, thawed=step))
        writer.apply_retention()

    def look() -> None:
        newest = read_lineage(run).candidates[0].point
        told = writer.manifest.run_id, writer.manifest.term, newest
        log_keeper.look_after(*told, reached=0, fits=True, now=True, base_bytes=lambda: need + 8192)
        log_keeper.wait(10)

    base(0)
    for step in range(1, 100):
        seal = Seal(step, step - 1, random_states(), b"", (b"",), 0)
        log_keeper.offer(seal, [([seal], memoryview(b""))])
        look()
        assert directory_bytes(run) <= meter.limits.store_quota
        if log_keeper.broken:
            refused += 1
            base(step)
            bases += 1
            log_keeper.trouble = log_keeper.trouble.retry_now()
            look()
            assert log_keeper.reaches(step) == step
    assert 2 <= refused == bases <= 99 // 3, "most steps are logged"
    assert log_keeper.dropped == refused
    report = verify_run(run)
    assert report.problems == [] and report.log_step == 99
