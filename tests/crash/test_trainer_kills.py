"""SIGKILL of the trainer at any instant: at most one step lost, everything after it bit-identical.

Half of the kills come from outside after a random delay, half strike at a named place: in backward,
in the optimizer, in the middle of a slot, while a base is written, while attach resumes.
EVERYSTEP_KILLS says how many (8 by default, 200 for the full run), EVERYSTEP_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from .instants import IN_ATTACH, IN_LOOP, PLACES
from .jobs import OPTIMIZERS, read_journal
from .nursery import WAIT_SECONDS, Nursery

KILLS = int(os.environ.get("EVERYSTEP_KILLS", "8"))
SEED = int(os.environ.get("EVERYSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
ENDLESS = 1_000_000
JOBS = list(OPTIMIZERS)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


def plan_kills(job: str) -> list[str]:
    """The kills of one job: random delays, and places in turn (a full run leaves none out)."""
    shares = [KILLS // len(JOBS) + (i < KILLS % len(JOBS)) for i in range(len(JOBS))]
    places = [*sorted(PLACES), "base being written"]
    random.Random(SEED).shuffle(places)
    first = sum(share // 2 for share in shares[: JOBS.index(job)])
    return [
        places[(first + i // 2) % len(places)] if i % 2 else "random"
        for i in range(shares[JOBS.index(job)])
    ]


def live_and_die(nursery: Nursery, plan: str, chance: random.Random, order: dict[str, Any]) -> None:
    """One life of a trainer that ends in a SIGKILL."""
    if plan in PLACES:
        countdown = 1 if plan in IN_ATTACH else chance.randint(1, 60)
        code = nursery.wait(nursery.start(**order, instant=[plan, countdown]))
        assert code == -signal.SIGKILL, f"{plan!r} was never reached ({code}):\n{nursery.why()}"
        return
    journal, run = order["journal"], order["run"]
    lines = len(read_journal(journal))
    pid = nursery.start(**order)
    if plan == "base being written":
        _wait_for_base(run, journal, lines)
    elif lines and chance.random() < 0.3:
        time.sleep(chance.uniform(0, 0.6))  # from the first instruction on: it resumes just now
    else:
        _wait_for_steps(journal, lines)
        time.sleep(chance.uniform(0, 0.4))
    os.kill(pid, signal.SIGKILL)
    code = nursery.wait(pid)
    assert code == -signal.SIGKILL, f"the trainer ended by itself ({code}):\n{nursery.why()}"


def _wait_for_steps(journal: Path, lines: int) -> None:
    def stepped() -> bool:
        return any(e["kind"] == "step" for e in read_journal(journal)[lines:])

    wait_until(stepped, "a step of the trainer", WAIT_SECONDS, pause=0.005)


def _wait_for_base(run: Path, journal: Path, lines: int) -> None:
    """Until a folder of a base appears that was not there: its files are being written now."""
    _wait_for_steps(journal, lines)
    known = set(run.glob("terms/*/bases/*"))
    wait_until(
        lambda: set(run.glob("terms/*/bases/*")) - known, "a base", WAIT_SECONDS, pause=0.0005
    )


def check_losses(journal: Path) -> tuple[int, int]:
    """At most one step lost at each kill; returns the newest finished step and the kills that hurt."""
    finished = hurt = 0
    for event in read_journal(journal):
        if event["kind"] == "resumed":
            lost = finished - event["step"]
            assert 0 <= lost <= 1, f"{lost} steps lost: {finished} finished, resumed {event}"
            hurt += lost
            finished = event["step"]
        elif event["kind"] == "step":
            assert event["step"] == finished + 1
            finished = event["step"]
        elif event["kind"] == "status":
            assert event["dropped"] == 0 and event["health"] == "ok", event
    return finished, hurt


@pytest.mark.timeout(240 + 20 * KILLS)
@pytest.mark.parametrize("job", JOBS)
def test_killed_trainer_loses_at_most_one_step(job: str, nursery: Nursery, tmp_path: Path) -> None:
    print(f"EVERYSTEP_SEED={SEED} EVERYSTEP_KILLS={KILLS} job={job}")
    chance = random.Random(f"{SEED} {job}")
    run, journal, reference = tmp_path / "run", tmp_path / "journal", tmp_path / "reference"
    order = {"job": job, "journal": journal, "run": run, "on_lag": "wait"}
    for number, plan in enumerate(plan_kills(job)):
        print(f"kill {number}: {plan}")
        every = chance.choice([1, 5, "10m"]) if plan != "base being written" else 2
        live_and_die(nursery, plan, chance, {**order, "total": ENDLESS, "durable_every": every})
        check_losses(journal)
    finished, hurt = check_losses(journal)
    total = finished + 10
    nursery.run(**order, total=total)
    check_losses(journal)
    nursery.run(job=job, total=total, journal=reference)
    assert_same(journal, reference)
    print(f"{total} steps, {hurt} of them done twice")


def assert_same(journal: Path, reference: Path) -> None:
    """Every step ever done, also one that was done twice, is the unbroken run's; so is the end."""
    expected = {e["step"]: e for e in read_journal(reference) if e["kind"] == "step"}
    done = [e for e in read_journal(journal) if e["kind"] == "step"]
    assert {e["step"] for e in done} == set(expected)
    for event in done:
        assert event == expected[event["step"]], f"step {event['step']} differs"
    finals = [e for e in read_journal(journal) if e["kind"] == "final"]
    assert finals == [e for e in read_journal(reference) if e["kind"] == "final"]


def test_every_place_is_in_some_plan() -> None:
    """The full run visits every named place; the loop and attach are both attacked."""
    assert IN_LOOP and IN_ATTACH and not set(IN_LOOP) & set(IN_ATTACH)
    planned = {plan for job in JOBS for plan in plan_kills(job)}
    assert "random" in planned or KILLS < 2
    if 2 * len(PLACES) + 2 + len(JOBS) <= KILLS:
        assert planned >= {*PLACES, "base being written"}
