"""SIGKILL and SIGSTOP of the shadow: training goes on, and something valid can always be restored.

EVERYSTEP_SHADOW_KILLS says how many kills (4 by default, 50 for the full run), EVERYSTEP_SEED repeats.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

import everystep
from everystep.errors import EverystepError

from .jobs import Job, read_journal, train
from .nursery import Nursery
from .processes import shadows

KILLS = int(os.environ.get("EVERYSTEP_SHADOW_KILLS", "4"))
SEED = int(os.environ.get("EVERYSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
RING_SLOTS_MAX = 128


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def restored(run: Path, name: str) -> tuple[int, str]:
    """What a fresh process would get from this run now."""
    job = Job(name)
    step = everystep.restore(run, job.model, job.optimizer)
    return step, job.digest()


class Watcher(threading.Thread):
    """Asks all the time, from the first base on, whether the store has something to resume from."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._run = run
        self._stop_asking = threading.Event()
        self.looks = 0
        self.empty: list[str] = []

    def run(self) -> None:
        while not self._stop_asking.wait(0.001):
            stored = everystep.open_run(self._run)
            self.looks += 1
            if not stored.bases:
                terms = sorted(path.name for path in (self._run / "terms").iterdir())
                self.empty.append(f"look {self.looks}: nothing counts, terms {terms[-3:]}")

    def finish(self) -> None:
        self._stop_asking.set()
        self.join()
        assert self.looks > 0
        assert not self.empty, f"{len(self.empty)} of {self.looks} looks: {self.empty[0]}"


def new_shadow(runtime: Path, known: set[int]) -> int:
    found: set[int] = set()
    wait_until(lambda: found.update(set(shadows(runtime)) - known) or found, "a new shadow")
    return max(found)  # it may be the process that only starts one, and be gone again


def kill_shadows(runtime: Path, run: Path, chance: random.Random) -> list[tuple[int, str]]:
    """Kill one shadow after the other; after each kill, and a little later, restore what there is."""
    found, known = [], set()
    for number in range(KILLS):
        pid = new_shadow(runtime, known)
        delay = chance.choice([0.0, chance.uniform(0, 0.5), chance.uniform(0, 4)])
        time.sleep(delay)
        for victim in {pid, *shadows(runtime)}:
            known.add(victim)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        print(f"kill {number}: shadow {pid} {delay:.3f} s after it was seen")
        for pause in (0.0, chance.uniform(0, 1)):
            time.sleep(pause)
            found.append(restored(run, "everything"))
    return found


@pytest.mark.timeout(240 + 40 * KILLS)
def test_killed_shadow_never_stops_training(
    nursery: Nursery, runtime: Path, tmp_path: Path
) -> None:
    print(f"EVERYSTEP_SEED={SEED} EVERYSTEP_SHADOW_KILLS={KILLS}")
    run, journal, stop = tmp_path / "run", tmp_path / "journal", tmp_path / "stop"
    options = {"durable_every": 3, "on_lag": "drop", "pause_seconds": 0.002}
    trainer = nursery.start("everything", 10**6, journal, run=run, stop_file=stop, **options)
    watcher = Watcher(run)
    try:
        wait_until(lambda: list(run.glob("terms/*/bases/*/base.json")), "the first base")
        wait_until(lambda: everystep.open_run(run).steps, "the first base")
        watcher.start()
        found = kill_shadows(runtime, run, random.Random(SEED))
    finally:
        stop.touch()
        code = nursery.wait(trainer)
    assert code == 0, f"training ended with {code}:\n{nursery.why()}"
    watcher.finish()
    events = read_journal(journal)
    (status,) = [e for e in events if e["kind"] == "status"]
    assert status["health"] == "ok", status
    check_against_reference(nursery, tmp_path, events, found, run)


def check_against_reference(nursery, tmp_path, events, found, run) -> None:  # type: ignore[no-untyped-def]
    """Training was not disturbed by one bit, and every state ever restored was a state it had."""
    steps = [e for e in events if e["kind"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, len(steps) + 1)), (
        "training did not just go on"
    )
    nursery.run("everything", len(steps), tmp_path / "reference")
    reference = read_journal(tmp_path / "reference")
    assert steps == [e for e in reference if e["kind"] == "step"]
    assert [e for e in events if e["kind"] == "final"] == [
        e for e in reference if e["kind"] == "final"
    ]
    digests = {e["step"]: e["digest"] for e in steps} | {0: Job("everything").digest()}
    wrong = [number for number, (step, digest) in enumerate(found) if digest != digests[step]]
    restored_steps = [step for step, _ in found]
    assert not wrong, f"restores {wrong} of steps {restored_steps} are no state that training had"
    assert restored_steps == sorted(restored_steps), f"durable went back: {restored_steps}"
    newest = len(steps), digests[len(steps)]
    assert restored(run, "everything") == newest, f"close wrote less:\n{nursery.why()}"


def seal_steps(run: everystep.Run, job: Job, count: int) -> dict[int, str]:
    digests = {}
    for step in run.steps(run.step + count):
        job.step()
        digests[step + 1] = job.digest()
    return digests


def test_stopped_shadow_with_drop_lets_go_and_bases_itself_anew(
    runtime: Path, tmp_path: Path
) -> None:
    job = Job("everything")
    options = {"run": tmp_path / "run", "state": job.state, "on_lag": "drop"}
    with everystep.attach(job.model, job.optimizer, every=1, **options) as run:
        seal_steps(run, job, 3)
        wait_until(lambda: run.status()["warm"], "a warm shadow")
        (pid,) = shadows(runtime)
        os.kill(pid, signal.SIGSTOP)
        try:
            digests = seal_steps(run, job, RING_SLOTS_MAX + 40)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: run.status()["records_dropped"] > 0, "records to be dropped", 1)

        def in_step() -> bool:
            digests.update(seal_steps(run, job, 1))
            status = run.status()
            return status["shadow_step"] == run.step and status["health"] == "ok"

        wait_until(in_step, "the shadow to be in step again")
        dropped = run.status()["records_dropped"]
        digests.update(seal_steps(run, job, 5))
        assert run.status()["records_dropped"] == dropped, "records are still dropped"
        assert shadows(runtime) == [pid], "the same shadow is there"
        run.flush()
        assert restored(run.path, "everything") == (run.step, digests[run.step])


def wake_when_stalled(run: everystep.Run, pid: int) -> None:
    """Wake the shadow once the trainer makes no step any more: the ring is full then."""
    last, since = run.step, time.monotonic()
    while time.monotonic() - since < 1:
        if run.step != last:
            last, since = run.step, time.monotonic()
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)


def test_stopped_shadow_with_wait_loses_nothing(runtime: Path, tmp_path: Path) -> None:
    job = Job("adam")
    options = {"run": tmp_path / "run", "state": job.state, "on_lag": "wait"}
    with everystep.attach(job.model, job.optimizer, every=1, **options) as run:
        seal_steps(run, job, 3)
        wait_until(lambda: run.status()["warm"], "a warm shadow")
        (pid,) = shadows(runtime)
        os.kill(pid, signal.SIGSTOP)
        waker = threading.Thread(target=wake_when_stalled, args=(run, pid))
        waker.start()
        digests = seal_steps(run, job, RING_SLOTS_MAX + 40)
        waker.join()
        status = run.status()
        assert status["records_dropped"] == 0 and status["stall_seconds"] > 0
        run.flush()
        assert restored(run.path, "adam") == (run.step, digests[run.step])
    train("adam", run.step, tmp_path / "reference")
    reference = [e for e in read_journal(tmp_path / "reference") if e["kind"] == "step"]
    assert {e["step"]: e["digest"] for e in reference[3:]} == digests


def test_flush_has_a_dead_shadow_replaced(runtime: Path, tmp_path: Path) -> None:
    """It had raised that there was none, while a new one was just starting."""
    job = Job("adamw")
    with everystep.attach(job.model, job.optimizer, run=tmp_path / "run", every=1) as run:
        for step in run.steps(6):
            if step == 3:
                os.kill(run.status()["pid"], signal.SIGKILL)
                assert run.flush() == 3
                assert everystep.open_run(tmp_path / "run").bases[0].entry.step == 3
            job.step()
            if step == 4:
                os.kill(run.status()["pid"], signal.SIGKILL)
                with pytest.raises(EverystepError, match="the step after it has begun") as refusal:
                    run.flush()
                assert "call flush before anything of a step" in str(refusal.value)
    assert restored(tmp_path / "run", "adamw") == (6, job.digest())
