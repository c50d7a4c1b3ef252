"""Batches are padded to whole blocks: however little is left of a block, the next batch is found."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import ondisk
import pytest

from everystep.core.census import Census
from everystep.errors import UnknownVersion
from everystep.format import log as log_format
from everystep.format.base import Point
from everystep.format.log import BLOCK_BYTES, HEAD_BYTES, LoggedRecord, census_digest
from everystep.store.disk import stream
from everystep.store.disk.stream import BUFFER_BYTES, StreamWriter
from everystep.store.log import LogWriter
from everystep.store.log_reader import read_log
from everystep.store.runs import Lineage

pytestmark = pytest.mark.usefixtures("plain_bodies")
CENSUS = Census((), (), "exact")
RUN_ID = "cd" * 16


@pytest.mark.parametrize("first", [b"\0", b"\x45", b"\xff"])
def test_every_length(first: bytes, tmp_path: Path) -> None:
    ondisk.term_dir(tmp_path, 1).mkdir(parents=True)
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
    found = read_log(tmp_path, lineage, Point(1, 0), CENSUS)
    assert found.problems == []
    assert [bytes(record.body) for record in found] == bodies


def test_records_larger_than_what_is_written_at_once(tmp_path: Path) -> None:
    """Their heads are written last: one that a crash left out ends the log before it."""
    ondisk.term_dir(tmp_path, 1).mkdir(parents=True)
    writer = LogWriter(tmp_path, RUN_ID, 1, census_digest(CENSUS))
    bodies = [bytes([65 + step]) * (BUFFER_BYTES + 1000 * step) for step in range(4)]
    for first in (0, 2):
        writer.append(
            [LoggedRecord(s + 1, s, memoryview(bodies[s])) for s in range(first, first + 2)]
        )
    path = Path(writer.end[0])
    writer.close()
    lineage = Lineage(RUN_ID, [], [], ((1, None),))
    found = read_log(tmp_path, lineage, Point(1, 0), CENSUS)
    assert [bytes(record.body) for record in found] == bodies
    start = path.read_bytes().index(bodies[2][:100]) - HEAD_BYTES
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(HEAD_BYTES))
    found = read_log(tmp_path, lineage, Point(1, 0), CENSUS)
    assert found.end.step == 2
    assert "not finished" in found.problems[0]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of some thousand bytes are larger than what is written at once."""
    options = StreamWriter.__init__.__kwdefaults__
    assert options is not None
    monkeypatch.setitem(options, "buffer_bytes", 2 * BLOCK_BYTES)


BODIES = [bytes([65 + step]) * size for step, size in enumerate((30_000, 100, 20_000, 50_000, 9))]


def write_batches(writer: LogWriter, *batches: range) -> None:
    for steps in batches:
        writer.append([LoggedRecord(s + 1, s, memoryview(BODIES[s])) for s in steps])


@pytest.mark.usefixtures("small_buffers")
def test_whatever_blocks_a_crash_left_out_of_the_last_batch(tmp_path: Path) -> None:
    """Its parts are not written in order: what was synced before counts, and of it nothing but a prefix."""
    ondisk.term_dir(tmp_path, 1).mkdir(parents=True)
    writer = LogWriter(tmp_path, RUN_ID, 1, census_digest(CENSUS))
    write_batches(writer, range(2))
    path, synced = Path(writer.end[0]), writer.end[1]
    write_batches(writer, range(2, 5))
    writer.close()
    whole = path.read_bytes()
    for at in range(synced, len(whole), BLOCK_BYTES):
        path.write_bytes(whole[:at] + bytes(BLOCK_BYTES) + whole[at + BLOCK_BYTES :])
        found = read_log(tmp_path, Lineage(RUN_ID, [], [], ((1, None),)), Point(1, 0), CENSUS)
        count = len(found)
        assert 2 <= count < 5
        assert [bytes(record.body) for record in found] == BODIES[:count]


@pytest.mark.usefixtures("small_buffers")
def test_a_disk_that_is_full_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a head is still to be written: nothing of that batch counts, and the next one does."""
    written = os.pwrite
    failed = set()
    for number in range(1, 40):
        run = tmp_path / str(number)
        ondisk.term_dir(run, 1).mkdir(parents=True)
        writer = LogWriter(run, RUN_ID, 1, census_digest(CENSUS))
        write_batches(writer, range(2))
        left = iter(range(number))

        def pwrite(fd: int, data: memoryview, at: int, left: Iterator[int] = left) -> int:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return written(fd, data, at)

        with monkeypatch.context() as full:
            full.setattr(stream.os, "pwrite", pwrite)
            try:
                write_batches(writer, range(2, 5))
            except OSError:
                failed.add(number)
        if number in failed:
            write_batches(writer, range(2, 5))
        writer.close()
        found = read_log(run, Lineage(RUN_ID, [], [], ((1, None),)), Point(1, 0), CENSUS)
        assert [bytes(record.body) for record in found] == BODIES
    assert failed == set(range(1, len(failed) + 1)) and len(failed) > 5


@pytest.mark.parametrize("version", [log_format._VERSION - 1, log_format._VERSION + 1])
def test_a_segment_of_another_everystep_is_refused(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passing it over would lose steps that are there."""
    ondisk.term_dir(tmp_path, 1).mkdir(parents=True)
    with monkeypatch.context() as other:
        other.setattr(log_format, "_VERSION", version)
        writer = LogWriter(tmp_path, RUN_ID, 1, census_digest(CENSUS))
        writer.append([LoggedRecord(1, 0, memoryview(b"body"))])
        writer.close()
    with pytest.raises(UnknownVersion, match=f"version {version}") as refusal:
        read_log(tmp_path, Lineage(RUN_ID, [], [], ((1, None),)), Point(1, 0), CENSUS)
    assert refusal.value.hint


def test_a_segment_of_another_rank_is_not_read(tmp_path: Path) -> None:
    """Wherever it lies: its records speak of other tensors."""
    ondisk.term_dir(tmp_path, 1).mkdir(parents=True)
    lineage = Lineage(RUN_ID, [], [], ((1, None),))
    writer = LogWriter(tmp_path, RUN_ID, 1, census_digest(CENSUS), rank=1)
    writer.append([LoggedRecord(1, 0, memoryview(b"body"))])
    writer.close()
    assert len(read_log(tmp_path, lineage, Point(1, 0), CENSUS)) == 0
    log = ondisk.log_dir(tmp_path, 1)
    log.with_name("000001").rename(log)
    found = read_log(tmp_path, lineage, Point(1, 0), CENSUS)
    assert len(found) == 0 and "another run, term or rank" in found.problems[0]
