"""Lives of a run on a disk that may refuse anything, and whose power goes at many instants: each time another
machine finds what the disk holds, goes on with it, and finds what that left."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from faults.disk import Disk, Operation
from faults.inject import Faults
from faults.power import build, survivors
from faults.work import Claim, Work, problems

OPERATIONS, INSTANTS = 14, 12
_REFUSES = 0.5  # of all disks


Forgets = Callable[[Operation, bool], bool]  # told whether it is about a folder


def live(seed: int, forgets: Forgets = lambda operation, folder: False) -> Iterator[str]:
    """What went wrong in one life and the INSTANTS crashes of it, in words. `forgets` tells the syncs that
    somebody has forgotten: the disk never saw them."""
    chance = random.Random(f"faults {seed}")
    folder = Path(tempfile.mkdtemp(prefix="fs-", dir=_memory()))
    try:
        (folder / "disk").mkdir()
        faults = Faults(random.Random(f"disk {seed}"))
        refuses = chance.random() < _REFUSES
        with Disk(folder / "disk", faults).watched() as disk:
            run, bucket = folder / "disk" / "run", folder / "bucket"
            work = Work(run, bucket, chance, lambda: len(disk.trace), lambda: faults.reads_failed)
            yield from (f"seed {seed}: {told}" for told in _operate(work, faults, chance, refuses))
        if disk.unseen:
            yield f"seed {seed}: written past the disk: {disk.unseen[0]}"
        trace = _without(disk, forgets)
        for number in range(INSTANTS):
            instant = chance.randrange(len(trace) + 1)
            target = folder / f"after-{number}"
            build(survivors(trace, instant, chance), disk.folders, target)
            for told in _found(target / "run", work, instant, chance):
                yield f"seed {seed}, crash {number} at {instant} of {len(disk.trace)}: {told}"
            shutil.rmtree(target)
    finally:
        shutil.rmtree(folder)


def _without(disk: Disk, forgets: Forgets) -> Sequence[Operation]:
    forgotten = Operation("nothing", 0)
    return [
        forgotten if o.kind == "sync" and forgets(o, disk.folders[o.node]) else o
        for o in disk.trace
    ]


def _operate(work: Work, faults: Faults, chance: random.Random, refuses: bool) -> Iterator[str]:
    """Some operations, on some of which the disk refuses; then it is well, and all heals by itself."""
    for _ in range(chance.randrange(3, OPERATIONS)):
        if refuses and chance.random() < 0.5:
            faults.arm()
        failed = len(work.failed)
        try:
            work.do_something()
        except Exception as error:
            yield f"{type(error).__name__}: {error} after {work.done} and {faults.struck}"
            return
        finally:
            faults.rest()
        struck, faults.struck = faults.struck, []
        if len(work.failed) > failed and not struck:
            yield f"without a fault: {work.failed[-1]}"
        told = problems(work.run, work, work.promised(work.instant()))
        yield from (f"{line}, after {work.done[-1]} and {struck}" for line in told)
    failed = len(work.failed)
    for _ in range(3):
        work.do_something()
    yield from (f"not healed: {told}" for told in work.failed[failed:])
    yield from problems(work.run, work, work.promised(work.instant()))


def _found(run: Path, work: Work, instant: int, chance: random.Random) -> Iterator[str]:
    try:
        with_bucket = chance.random() < 0.5 and work.bucket_at(instant, run.parent / "bucket")
        again = Work(run, run.parent / "bucket", chance, lambda: 0)
        again.branch, again.history = work.branch + 1, work.history
        again.claims = [(0, Claim(whole=work.promised(instant).whole))]
        if with_bucket:
            again.sync_from_bucket()
        yield from problems(run, work, work.promised(instant))
        for _ in range(4):
            again.do_something()
        # of a directory that somebody was just removing, what is gone is told as damage
        whole = work.promised(instant).whole
        failed = [told for told in again.failed if whole or "CorruptData" not in told]
        yield from (f"then: {told}" for told in failed)
        yield from (f"then: {told}" for told in problems(run, again, again.promised(0)))
    except Exception as error:
        yield f"{type(error).__name__}: {error}"


def _memory() -> str | None:
    """Thousands of small files come and go."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
