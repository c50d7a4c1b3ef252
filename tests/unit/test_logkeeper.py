"""What the durable log claims to bring back is what it can."""

from __future__ import annotations

import time
from pathlib import Path

from everystep.core.census import Census
from everystep.core.events import Seal
from everystep.format.base import Point
from everystep.shadow.logkeeper import LogKeeper
from everystep.store import layout
from everystep.store.log import LogReader
from everystep.store.runs import Lineage

CENSUS = Census((), (), "exact")
RUN_ID = "ab" * 16


class Bench:
    def __init__(self, run: Path) -> None:
        self.run = run
        layout.epoch_dir(run, 1).mkdir(parents=True)
        self.keeper = LogKeeper(run, CENSUS, 1)
        self.base = Point(1, 0)

    def log(self, step: int, after: int, *, fits: bool = True) -> None:
        self.keeper.offer(Seal(step, after, b"", b"", (), 0), [])
        self.look(fits=fits)

    def look(self, *, fits: bool = True) -> None:
        self.keeper.look_after(RUN_ID, 1, self.base, fits=fits, now=True)
        deadline = time.monotonic() + 10
        while self.keeper.busy and time.monotonic() < deadline:
            time.sleep(0.001)

    def check(self, expected: int) -> None:
        lineage = Lineage(RUN_ID, [], [], ((1, None),))
        found = LogReader(self.run, lineage, self.base, CENSUS)
        assert self.keeper.reaches(self.base.step) == expected == found.end.step


def test_steps_that_the_trainer_let_go_end_the_log_until_the_next_base(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step in (1, 2):
        bench.log(step, step - 1)
    bench.check(2)
    bench.log(7, 6)
    bench.log(8, 7)
    bench.check(2)
    assert bench.keeper.broken
    bench.base = Point(1, 7)
    bench.look()
    bench.check(8)
    assert not bench.keeper.broken


def test_behind_a_base_of_another_model_nothing_is_claimed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log(1, 0, fits=False)
    assert bench.keeper.broken and bench.keeper.reaches(0) == 0
    bench.base = Point(1, 1)
    bench.look()
    bench.log(2, 1)
    bench.check(2)
