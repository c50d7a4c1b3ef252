"""While one shadow follows another, a trainer may die at any instant: one of the two always speaks
for the run, and whoever comes back gets the one that holds the newer steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

import everystep
from everystep import connection
from everystep.lane import runtime
from everystep.lane.control import AskStatus, ask
from everystep.lane.runtime import ShadowCard, read_card, runtime_dir, write_card
from everystep.recover.find import find_newest
from everystep.recover.point import RestorePoint

from .harness import Job, crash, seed_all
from .test_groups import growing


def test_a_successor_that_came_while_a_card_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (ShadowCard(pid, 0, "", "") for pid in (1, 2))
    write_card(tmp_path, first)

    def alive(card: ShadowCard) -> bool:
        write_card(tmp_path, second)  # and the first has gone, between two looks at it
        return card == second

    monkeypatch.setattr(runtime, "is_alive", alive)
    assert read_card(tmp_path) == second
    monkeypatch.setattr(runtime, "is_alive", lambda card: False)
    assert read_card(tmp_path) is None


def test_a_shadow_speaks_for_the_run_at_every_instant(tmp_path: Path) -> None:
    seed_all(1)
    job = growing(2, False)
    silences, done = [], threading.Event()
    with everystep.attach(
        job.model, job.optimizer, run=tmp_path / "run", every=1, on_lag="wait"
    ) as run:
        folder = runtime_dir(str(run.path))
        speakers = set()

        def watch() -> None:
            while not done.is_set():
                card = read_card(folder)
                if card is None:
                    silences.append(run.step)
                else:
                    speakers.add(card.pid)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for step in run.steps(4):
                job.turn(step)
            run.flush(60)
        finally:
            done.set()
            watcher.join()
    assert len(speakers) == 2, "the added group should have brought a second shadow"
    assert silences == []


def growing_beside_a_stopped_successor() -> Job:
    """The shadow that the added group brings is stopped before it can take anything in."""
    start, shadows = connection.start_shadow, []

    def start_and_stop(**fields: Any) -> Any:
        shadows.append(start(**fields))
        if len(shadows) == 2:
            os.kill(shadows[1].pid, signal.SIGSTOP)
        return shadows[-1]

    connection.start_shadow = start_and_stop
    return growing(2, False)


def test_the_shadow_before_leaves_newer_steps_to_its_successor(tmp_path: Path) -> None:
    run = tmp_path / "run"
    crash(growing_beside_a_stopped_successor, run, 4)
    folder = runtime_dir(str(run))
    _wait_until_it_could_answer(folder)
    found: list[RestorePoint | None] = []
    finder = threading.Thread(target=lambda: found.append(find_newest(run, folder)[0]))
    finder.start()
    time.sleep(1)
    assert not found, "the shadow before gave away a step that its successor has passed"
    for pid in _stopped_shadows():
        os.kill(pid, signal.SIGCONT)
    finder.join(60)
    assert found and found[0] is not None
    assert (found[0].source, found[0].point.step) == ("shadow", 4)
    found[0].close()


def _wait_until_it_could_answer(folder: Path) -> None:
    card = read_card(folder)
    assert card is not None
    wait_until(
        lambda: ask(card.control, AskStatus(), timeout_seconds=10).status["warm"],
        "the first shadow to load torch",
        pause=0.05,
    )


def _stopped_shadows() -> list[int]:
    home = f"EVERYSTEP_RUNTIME_DIR={os.environ['EVERYSTEP_RUNTIME_DIR']}".encode()
    stopped = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and home in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                stopped += [int(entry.name)] if state == "T" else []
    return stopped
