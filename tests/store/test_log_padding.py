"""Batches are padded to whole blocks: however little is left of a block, the next batch is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from everystep.core.census import Census
from everystep.errors import UnknownVersion
from everystep.format import log as log_format
from everystep.format.base import Point
from everystep.format.log import BLOCK_BYTES, LoggedRecord, census_digest
from everystep.store import layout
from everystep.store.log import LogReader, LogWriter
from everystep.store.runs import Lineage
from everystep.store.stream import BUFFER_BYTES

CENSUS = Census((), (), "exact")
RUN_ID = "cd" * 16
HEAD_BYTES = 48


@pytest.mark.parametrize("first", [b"\0", b"\x45", b"\xff"])
def test_every_length(first: bytes, tmp_path: Path) -> None:
    layout.epoch_dir(tmp_path, 1).mkdir(parents=True)
    writer = LogWriter(tmp_path, RUN_ID, 1, census_digest(CENSUS))
    bodies = []
    for left in range(2 * HEAD_BYTES + 2):  # of the last block of a batch of two records
        size = 2 * BLOCK_BYTES - left - 2 * HEAD_BYTES
        for part in (100, size - 100):
            bodies.append(first * part)
        step = len(bodies)
        writer.append(
            [
                LoggedRecord(step - 1, step - 2, memoryview(bodies[-2])),
                LoggedRecord(step, step - 1, memoryview(bodies[-1])),
            ]
        )
    writer.close()
    lineage = Lineage(RUN_ID, [], [], ((1, None),))
    found = LogReader(tmp_path, lineage, Point(1, 0), CENSUS)
    assert found.problems == []
    assert [bytes(record.body) for record in found.records] == bodies


def test_records_larger_than_what_is_written_at_once(tmp_path: Path) -> None:
    """Their heads are written last: one that a crash left out ends the log before it."""
    layout.epoch_dir(tmp_path, 1).mkdir(parents=True)
    writer = LogWriter(tmp_path, RUN_ID, 1, census_digest(CENSUS))
    bodies = [bytes([65 + step]) * (BUFFER_BYTES + 1000 * step) for step in range(4)]
    for first in (0, 2):
        writer.append(
            [LoggedRecord(s + 1, s, memoryview(bodies[s])) for s in range(first, first + 2)]
        )
    path = writer.end[0]
    writer.close()
    lineage = Lineage(RUN_ID, [], [], ((1, None),))
    found = LogReader(tmp_path, lineage, Point(1, 0), CENSUS)
    assert [bytes(record.body) for record in found.records] == bodies
    start = path.read_bytes().index(bodies[2][:100]) - HEAD_BYTES
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(HEAD_BYTES))
    found = LogReader(tmp_path, lineage, Point(1, 0), CENSUS)
    assert found.end.step == 2
    assert "not finished" in found.problems[0]


def test_a_segment_of_a_newer_everystep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passing it over would lose steps that are there."""
    layout.epoch_dir(tmp_path, 1).mkdir(parents=True)
    with monkeypatch.context() as newer:
        newer.setattr(log_format, "_VERSION", 3)
        writer = LogWriter(tmp_path, RUN_ID, 1, census_digest(CENSUS))
        writer.append([LoggedRecord(1, 0, memoryview(b"body"))])
        writer.close()
    with pytest.raises(UnknownVersion, match="version 3"):
        LogReader(tmp_path, Lineage(RUN_ID, [], [], ((1, None),)), Point(1, 0), CENSUS)
