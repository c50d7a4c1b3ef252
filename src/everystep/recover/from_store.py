"""The point that a store holds: a base whose every byte is right, and the log behind it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from everystep.core.events import Seal
from everystep.errors import StoreError, UnknownVersion
from everystep.format.base import Base, Point, after_seal
from everystep.format.entry import unframe_entries
from everystep.format.planes import check_readable
from everystep.recover.choose import log_until
from everystep.recover.point import RestorePoint
from everystep.store.bases import BaseReader, read_base
from everystep.store.log_reader import LogReader, read_log
from everystep.store.reach import whole_bases
from everystep.store.runs import Candidate, Lineage

log = logging.getLogger(__name__)

_CHECKERS = 4  # threads: nobody trains yet


def stored_point(
    run: Path,
    lineage: Lineage,
    step: int | None,
    problems: list[str],
    *,
    exact: bool,
    verify_lazily: bool,
) -> RestorePoint | None:
    """The newest; damaged bases are named and passed over. A step that is wanted may lie in the log."""
    wanted = [c for c in whole_bases(lineage) if step is None or c.entry.step <= step]
    for candidate in wanted:
        at = candidate.entry.step
        try:
            base = read_base(run, candidate)
            lacking = any(atom.lossy for atom in base.census.atoms)
            until = log_until(at, step, exact=exact, lacking=lacking)
            found, behind = _read(run, lineage, candidate, base, until, check=not verify_lazily)
        except UnknownVersion:
            raise
        except StoreError as error:
            log.warning("base_skipped step=%d error=%s", at, error)
            problems.append(str(error))
            continue
        if step is None or behind.end.step == step:
            problems += behind.problems
            if lacking and behind.end.step > at:
                problems.append(
                    f"step {behind.end.step}: weights and optimizers are exact, residuals of compression are "
                    f'those of step {at} (tuning=Tuning(residuals="exact") resumes there instead)'
                )
            return _with_log(found, behind)._replace(problems=problems)
    return None


def _read(
    run: Path,
    lineage: Lineage,
    candidate: Candidate,
    base: Base,
    until: int | None,
    *,
    check: bool,
) -> tuple[RestorePoint, LogReader]:
    """A base and the log behind it at the same time, that one checked or not."""
    read = read_log if check else LogReader
    with ThreadPoolExecutor(1, "everystep-log") as beside:
        behind = beside.submit(read, run, lineage, candidate.point, base.census, until)
        reader, log_reader = BaseReader(run, base, threads=_CHECKERS), behind.result()
    return _base(candidate.point, reader), log_reader


def _base(point: Point, reader: BaseReader) -> RestorePoint:
    base = reader.base
    return RestorePoint(
        point,
        "store",
        base.census,
        reader.session(),
        reader.tensors,
        reader.tail(),
        base.tail_steps,
        [],
    )


def _with_log(base: RestorePoint, behind: LogReader) -> RestorePoint:
    session = base.session
    for record in behind.unchecked_records():
        for events, _ in unframe_entries(record.body):
            check_readable(events)  # before anything live is changed
            for event in events:
                session = after_seal(session, event) if isinstance(event, Seal) else session
    behind.prefetch()
    return base._replace(point=behind.end, session=session, log=behind)
