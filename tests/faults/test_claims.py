"""What `status` claims for the loss of the host is what recovery finds, or less: at any instant of any life
of a run, whatever the trainer drops, the disk refuses or somebody changes in the model."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import ondisk
import pytest
from states import random_states

from everystep.cli.status import run_status
from everystep.core.census import Census
from everystep.core.events import Edit, Rebase, Seal
from everystep.core.retention import Rules
from everystep.errors import EverystepError
from everystep.format.base import Point
from everystep.format.log import read_heads
from everystep.recover.find import find_newest
from everystep.shadow.base_writer import BaseWriter
from everystep.shadow.logkeeper import LogKeeper
from everystep.shadow.report import describe_store

from .damage import damage, newest_segment
from .disk import Disk
from .inject import Faults
from .power import build, survivors
from .work import CENSUS, SIZES, content, snapshot

LIVES = int(os.environ.get("EVERYSTEP_CLAIMS", "15"))
OPERATIONS = 40
# of another model, whose tensors are as large
OTHER = msgspec.structs.replace(
    CENSUS, atoms=tuple(msgspec.structs.replace(a, name=f"new.{a.name}") for a in CENSUS.atoms)
)


class Life:
    """What a shadow's loop does with store and log, without a trainer."""

    def __init__(self, run: Path, chance: random.Random, faults: Faults) -> None:
        self.run, self.chance, self.faults = run, chance, faults
        self.step = 0
        self.census: Census = CENSUS
        self.begin()

    def begin(self) -> None:
        """A shadow that goes on from what there is; or is handed a newer state, which no base holds."""
        point = newest_in(self.run)
        if point is not None and (self.step < point.step or self.chance.random() < 0.6):
            self.step = point.step
        if self.chance.random() < 0.3:
            self.census = OTHER if self.census is CENSUS else CENSUS
        self.base_writer = BaseWriter(self.run, point, Rules(self.chance.choice([1, 2])))
        self.log = LogKeeper(self.run, self.census, self.chance.choice([1, 1, 3]))
        self.look()

    def claimed(self) -> int:
        shipper = SimpleNamespace(describe=lambda *_: None)
        told = describe_store(self.base_writer, self.log, shipper)  # type: ignore[arg-type]
        step = told["durable_step"]
        return -1 if step is None else int(step)

    def do_something(self) -> str:
        work = self.chance.choices(
            [self.record, self.drop, self.anew, self.base, self.again, self.batch],
            [12, 1, 1, 3, 1, 1],
        )[0]
        work()
        self.look()
        return f"{work.__name__} -> {self.step}"

    def record(self) -> None:
        after, self.step = self.step, self.step + 1
        self._offer(after, Edit(2, "", "uint8", (SIZES[2],), 0, SIZES[2], 0))

    def drop(self) -> None:
        self.step += self.chance.choice([1, 3])
        self.record()

    def anew(self) -> None:
        """The trainer sends its state again."""
        after, self.step = self.step, self.step + 1
        atoms = range(len(self.census.atoms))
        self._offer(after, Rebase(tuple(atoms), tuple(atoms)))

    def base(self) -> None:
        made_in = dict.fromkeys(range(self.step + 1), 0)
        written = snapshot(self.step, made_in)._replace(census=self.census)
        self.base_writer.write_now(written)

    def again(self) -> None:
        self.log.wait(10)
        self.faults.rest()  # who attaches to a disk that cannot be read is told, and begins nothing
        self.begin()

    def batch(self) -> None:
        self.log.write_in_batches(self.chance.choice([0, 1, 2, 5]), 0)

    def look(self) -> None:
        base_writer = self.base_writer
        if not base_writer.state.term:
            base_writer.claim()
        self.log.look_after(
            base_writer.run_id,
            base_writer.state.term,
            base_writer.state.durable,
            reached=base_writer.state.reached,
            fits=base_writer.base_fits(self.census),
            now=self.chance.random() < 0.7,
        )
        self.log.wait(10)
        self.log.trouble = self.log.trouble.retry_now()  # a shadow would try again later

    def _offer(self, after: int, event: Edit | Rebase) -> None:
        seal = Seal(self.step, after, random_states(self.step, 0), b"", (b"",), 0)
        edit = isinstance(event, Edit)
        data = content(2, "", self.step, {}, SIZES[2]) if edit else b""
        self.log.offer(seal, [([event, seal], memoryview(data))])


@pytest.mark.parametrize("seed", range(LIVES))
def test_what_is_claimed_comes_back(seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"claims {seed}")
    faults = Faults(random.Random(f"disk {seed}"))
    (tmp_path / "disk").mkdir()
    told: list[str] = []
    with Disk(tmp_path / "disk", faults).watched() as disk:
        life = Life(tmp_path / "disk" / "run", chance, faults)
        for _ in range(OPERATIONS):
            if chance.random() < 0.2:
                faults.arm()
            told.append(life.do_something())
            faults.rest()
            claimed, found = life.claimed(), step_in(life.run)
            assert claimed <= found, f"{told}, {faults.struck}"
            if chance.random() < 0.2:
                after = tmp_path / "after"
                build(survivors(disk.trace, len(disk.trace), chance), disk.folders, after)
                there = step_in(after / "run")
                assert claimed <= there, f"the power went after {told}, {faults.struck}"
                assert claimed_of_dead(after / "run") == there, f"the power went after {told}"
                shutil.rmtree(after)


@pytest.mark.parametrize("seed", range(LIVES))
def test_what_is_claimed_of_a_dead_run_comes_back(seed: int, tmp_path: Path) -> None:
    """Whatever is gone, cut off or torn: what recovery would pass over is not claimed."""
    chance = random.Random(f"dead {seed}")
    life = Life(tmp_path / "run", chance, Faults(chance))
    for _ in range(OPERATIONS):
        life.do_something()
        if chance.random() < 0.5:
            continue
        copy = tmp_path / "damaged"
        shutil.copytree(life.run, copy)
        told = [damage(copy, chance) for _ in range(chance.choice([0, 1, 1, 2, 3]))]
        claimed = claimed_of_dead(copy)
        assert claimed == step_in(copy), told
        shutil.rmtree(copy)


@pytest.mark.parametrize("kind", ["tail", "index", "file", "shorter"])
def test_a_look_is_enough_to_know(kind: str, tmp_path: Path) -> None:
    chance = random.Random(2)
    life = Life(tmp_path / "run", chance, Faults(chance))
    life.log.write_in_batches(1, 0)
    steps = []
    for _ in range(2):
        life.base()
        steps.append(life.step)
        for _ in range(3):
            life.record()
            life.look()
    life.log.wait(10)
    log = newest_segment(life.run)
    assert log is not None and claimed_of_dead(life.run) == step_in(life.run) > steps[1]
    base = ondisk.part_dir(life.run, ondisk.term_numbers(life.run)[0], steps[1])
    if kind == "tail":  # the heads of a batch were written, its bodies were not
        data = bytearray(log.read_bytes())
        for head in list(read_heads(memoryview(bytes(data)), ""))[-2:]:
            data[head.start : head.start + head.size] = bytes(head.size)
        log.write_bytes(data)
    elif kind == "index":
        (base / ondisk.INDEX).write_bytes(b"rot")
    elif kind == "file":
        (base / ondisk.SESSION).unlink()
    elif kind == "shorter":
        os.truncate(base / ondisk.WEIGHTS, 100)
    assert claimed_of_dead(life.run) == step_in(life.run)
    healthy = kind == "tail"  # an end that is torn is what a crash leaves
    assert run_status(life.run)["health"] == ("ok" if healthy else "degraded")


def claimed_of_dead(run: Path) -> int:
    try:
        step = run_status(run)["durable_step"]
    except EverystepError:
        return -1
    return -1 if step is None else int(step)


def newest_in(run: Path) -> Point | None:
    """What a machine that comes back goes on from."""
    try:
        found, _ = find_newest(run, None)
    except EverystepError:
        return None
    if found is None:
        return None
    found.close()
    return found.point


def step_in(run: Path) -> int:
    point = newest_in(run)
    return -1 if point is None else point.step


def test_claims_are_made(tmp_path: Path) -> None:
    """Or the test above would show nothing: of a life without faults, nearly every step is claimed."""
    chance = random.Random(1)
    life = Life(tmp_path / "run", chance, Faults(chance))
    life.log.write_in_batches(1, 0)
    life.base()
    for _ in range(20):
        life.record()
        time.sleep(0)
        life.look()
    life.log.look_after(
        life.base_writer.run_id, 1, life.base_writer.state.durable, reached=0, fits=True, now=True
    )
    life.log.wait(10)
    assert life.claimed() == step_in(life.run) == life.step
