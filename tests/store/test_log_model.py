"""The log against a dictionary: appended, crashed while it is written, continued, rewound and pruned, it has
what a dictionary would, and never anything else."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import ondisk
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from everystep.core.census import Census
from everystep.errors import CorruptData, Fenced
from everystep.format.base import Point
from everystep.format.log import BLOCK_BYTES, HEAD_BYTES, LoggedRecord, census_digest, read_heads
from everystep.store import log as log_module
from everystep.store.disk import stream
from everystep.store.disk.mapped import map_file
from everystep.store.log import LogWriter, old_segments
from everystep.store.log_reader import LogReader, read_log
from everystep.store.runs import Lineage

pytestmark = pytest.mark.usefixtures("plain_bodies")
RUN_ID = "ab" * 16
STREAM_DEFAULTS = stream.StreamWriter.__init__.__kwdefaults__ or {}
CENSUS = Census((), (), "exact")


lengths = st.integers(0, 200) | st.integers(3000, 9000)
# of a seed, not drawn byte by byte: fifty operations of these lengths are more than hypothesis draws
bodies = st.builds(
    lambda seed, length: random.Random(seed).randbytes(length), st.integers(0, 2**32), lengths
)


class LogModel(RuleBasedStateMachine):
    """`held` is what must be readable: step to body, behind `base`."""

    @initialize(
        segment_bytes=st.sampled_from([4096, 20_000, 1 << 30]),
        buffer_bytes=st.sampled_from([4096, stream.BUFFER_BYTES]),
    )
    def begin(self, segment_bytes: int, buffer_bytes: int) -> None:
        self.run = Path(tempfile.mkdtemp())
        log_module._SEGMENT_BYTES = segment_bytes
        STREAM_DEFAULTS["buffer_bytes"] = buffer_bytes  # many records are larger than a small one
        self.base, self.step = Point(1, 0), 0
        self.held: dict[int, bytes] = {}
        self.path: list[tuple[int, int | None]] = []
        self.old: list[LogWriter] = []
        self.open_term()

    def open_term(self) -> None:
        number = len(self.path) + 1
        ondisk.term_dir(self.run, number).mkdir(parents=True)
        self.path.append((number, None))
        self.writer = LogWriter(self.run, RUN_ID, number, census_digest(CENSUS))

    @rule(batch=st.lists(bodies, min_size=1, max_size=4))
    def append(self, batch: list[bytes]) -> None:
        records = []
        for body in batch:
            records.append(LoggedRecord(self.step + 1, self.step, memoryview(body)))
            self.step += 1
            self.held[self.step] = body
        self.writer.append(records)

    @rule(
        body=bodies,
        cut=st.floats(0, 1.1),
        garbage=st.sampled_from([b"", bytes(9000), b"\xa5" * 9000, b"\1" * 100]),
    )
    def crash_while_appending(self, body: bytes, cut: float, garbage: bytes) -> None:
        """Any part of an unfinished write may be there, or anything else; then a new term goes on."""
        term = self.path[-1][0]
        before = {p: p.stat().st_size for p in ondisk.segments(self.run, term)}
        self.writer.append([LoggedRecord(self.step + 1, self.step, memoryview(body))])
        newest = ondisk.segments(self.run, term)[-1]
        start = before.get(newest, 0)
        written = newest.read_bytes()
        whole = start + 4096 * (start == 0) + 48 + len(body)
        end = start + int(cut * (whole - start))
        torn = written[:end] + (garbage if end < whole else b"")
        newest.write_bytes(torn)
        if torn[:whole] == written[:whole]:  # it is all there: it counts, though nobody was told
            self.step += 1
            self.held[self.step] = body
        self.it_holds_what_it_should()  # who recovers now finds that and no more
        self.go_on_at(self.step)

    @rule(batch=st.lists(bodies, min_size=1, max_size=4), place=st.floats(0, 1, exclude_max=True))
    def crash_leaving_a_block_out(self, batch: list[bytes], place: float) -> None:
        """Buffers are not written in order: some block of an unfinished batch may be missing."""
        term = self.path[-1][0]
        before = {p: p.stat().st_size for p in ondisk.segments(self.run, term)}
        steps = range(self.step + 1, self.step + 1 + len(batch))
        self.writer.append(
            [LoggedRecord(s, s - 1, memoryview(b)) for s, b in zip(steps, batch, strict=True)]
        )
        newest = ondisk.segments(self.run, term)[-1]
        start = before.get(newest, BLOCK_BYTES)
        blocks = (newest.stat().st_size - start) // BLOCK_BYTES
        at = start + int(place * blocks) * BLOCK_BYTES
        with newest.open("r+b") as file:
            file.seek(at)
            file.write(bytes(BLOCK_BYTES))
        ends = start + np.cumsum([HEAD_BYTES + len(body) for body in batch])
        untouched = int((ends <= at).sum())
        read = len(self.read()) - len(self.held)
        assert untouched <= read <= len(batch)
        self.held |= dict(zip(steps[:read], batch[:read], strict=True))
        self.step += read
        self.it_holds_what_it_should()
        self.go_on_at(self.step)

    @rule(back=st.integers(0, 6))
    def rewind(self, back: int) -> None:
        self.go_on_at(max(self.base.step, self.step - back))

    def go_on_at(self, step: int) -> None:
        self.writer.close()
        self.old.append(self.writer)
        # a point lies in the term that wrote it, or in the base's
        point = self.read(until=step).end
        assert point.step == step
        self.path = [(e, n) for e, n in self.path if e < point.term] + [(point.term, step)]
        self.held = {s: b for s, b in self.held.items() if s <= step}
        self.step = step
        number = max(ondisk.term_numbers(self.run)) + 1
        ondisk.term_dir(self.run, number).mkdir(parents=True)
        self.path.append((number, None))
        self.writer = LogWriter(self.run, RUN_ID, number, census_digest(CENSUS))

    @rule(back=st.integers(0, 6))
    def base_and_prune(self, back: int) -> None:
        """The oldest base that is kept is of that step: what lies before it may go."""
        step = max(self.base.step, self.step - back)
        self.base = self.read(until=step).end
        self.held = {s: b for s, b in self.held.items() if s > step}
        self.writer.close()
        for path in old_segments(self.run, self.lineage, step):
            Path(path).unlink()

    @rule(chance=st.randoms(use_true_random=False))
    def rot_in_what_the_base_holds(self, chance: random.Random) -> None:
        """Nobody reads it again."""
        path = chance.choice(ondisk.segments(self.run, self.base.term) or [None])
        with contextlib.suppress(CorruptData):
            for head in read_heads(map_file(ondisk.place(path)), str(path)) if path else ():
                if head.step <= self.base.step and head.size:
                    data = bytearray(path.read_bytes())
                    data[head.start + chance.randrange(head.size)] ^= 1 + chance.randrange(255)
                    path.write_bytes(data)

    @rule()
    def a_zombie_writes_on(self) -> None:
        if self.old:
            with pytest.raises(Fenced):
                self.old[-1].append([LoggedRecord(self.step + 1, self.step, memoryview(b"zombie"))])

    @rule()
    def the_disk_is_full(self) -> None:
        full = OSError(28, "No space left on device")

        def refuse(*_: object, direct: bool) -> None:
            raise full

        write, stream._write_at = stream._write_at, refuse  # type: ignore[assignment]
        try:
            with pytest.raises(OSError):
                self.writer.append([LoggedRecord(self.step + 1, self.step, memoryview(b"lost"))])
        finally:
            stream._write_at = write

    @property
    def lineage(self) -> Lineage:
        return Lineage(RUN_ID, [], [], tuple(self.path))

    def read(self, until: int | None = None) -> LogReader:
        return read_log(self.run, self.lineage, self.base, CENSUS, until)

    @invariant()
    def it_holds_what_it_should(self) -> None:
        if hasattr(self, "run"):
            found = {r.step: bytes(r.body) for r in self.read()}
            assert found == self.held
            verify_lazily = {}
            with contextlib.suppress(CorruptData):  # what comes before that is the same
                for record in LogReader(self.run, self.lineage, self.base, CENSUS):
                    verify_lazily[record.step] = bytes(record.body)
            assert verify_lazily == self.held

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.writer.close()
            shutil.rmtree(self.run)
        log_module._SEGMENT_BYTES = 1 << 30
        STREAM_DEFAULTS["buffer_bytes"] = stream.BUFFER_BYTES


OPERATIONS = int(os.environ.get("EVERYSTEP_LOG_OPERATIONS", "1000"))
TestLog = LogModel.TestCase
TestLog.settings = settings(max_examples=max(1, OPERATIONS // 50), stateful_step_count=50)
