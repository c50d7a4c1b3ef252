"""Segments of the log go with the bases that needed them, also those of terms that are long over."""

from __future__ import annotations

from pathlib import Path

import ondisk

from everystep.cli.prune import prune_run
from everystep.core.retention import Rules
from everystep.format.base import Point
from everystep.store.log import old_segments
from everystep.store.runs import Lineage
from everystep.store.term import TermWriter

from .test_retention import snapshot
from .test_zombies import log_of, newest_point, record


def chained(run: Path, terms: int) -> TermWriter:
    """Each goes on where the log of the one before it ends; the writer of the last one."""
    for term in range(1, terms + 1):
        step = 10 * term
        writer = TermWriter(run, newest_point(run) if term > 1 else None, Rules(1))
        writer.commit(snapshot(step, thawed=step))
        logged = log_of(run, writer)
        logged.append([record(step + 1)])
        logged.close()
    return writer


def with_segments(run: Path) -> list[int]:
    return [term for term in ondisk.term_numbers(run) if ondisk.segments(run, term)]


def test_of_terms_that_were_gone_on_from_nothing_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = chained(run, 5)
    older = [path for term in range(1, 5) for path in ondisk.segments(run, term)]
    told = prune_run(run, {}, dry_run=True, force=False)
    assert told["log_frees_bytes"] == sum(path.stat().st_size for path in older) > 0
    assert with_segments(run) == [5, 4, 3, 2, 1]
    writer.apply_retention()
    assert with_segments(run) == [5]
    assert newest_point(run) == Point(5, 51)


def test_what_a_kept_base_needs_stays(tmp_path: Path) -> None:
    """The base of term 1 is the only one: the log behind it leads through both terms."""
    run = tmp_path / "run"
    chained(run, 1)
    for step in (11, 12):
        writer = TermWriter(run, newest_point(run), Rules(1))
        log_of(run, writer).append([record(step + 1)])
        writer.apply_retention()
    assert with_segments(run) == [3, 2, 1] and newest_point(run) == Point(3, 13)


def test_what_a_zombie_adds_does_not_keep_what_counts_no_longer(tmp_path: Path) -> None:
    """Term 1 was gone on from at step 20, and wrote a segment behind step 90 all the same."""
    folder = ondisk.log_dir(tmp_path, 1)
    folder.mkdir(parents=True)
    for number, after in ((1, 10), (2, 90)):
        (folder / ondisk.segment_name(number, after)).touch()
    lineage = Lineage("", [], [], ((1, 20), (2, None)))
    assert old_segments(tmp_path, lineage, 19) == []
    assert len(old_segments(tmp_path, lineage, 20)) == 2
