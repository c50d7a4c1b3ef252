"""A file system that hangs holds up nobody but who looks at it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_until

from everystep.core.trouble import Trouble
from everystep.format.base import Point
from everystep.shadow import directory_watch
from everystep.shadow.base_writer import PersistState
from everystep.shadow.directory_watch import DirectoryState, DirectoryWatch
from everystep.shadow.presence import Presence
from everystep.shadow.shipper import Shipper


def test_an_answer_is_as_new_as_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_watch, "_HANGS_SECONDS", 0.05)
    may, lost = threading.Event(), ["", "gone"]
    may.set()

    def look() -> DirectoryState:
        said = lost[0]
        may.wait(30)
        return DirectoryState(said)

    watch = DirectoryWatch(look)
    watch.keep_watch()
    first = watch.ask()
    wait_until(lambda: watch.has_answered(first), "the watch", 10, 0.001)
    may.clear()
    second = watch.ask()
    wait_until(lambda: watch.problem, "the watch", 10, 0.001)
    assert not watch.has_answered(second) and watch.state == DirectoryState(), "nobody waits for it"
    lost.pop(0)
    third = watch.ask()
    may.set()
    wait_until(lambda: watch.has_answered(third), "the watch", 10, 0.001)
    assert watch.state.lost == "gone" and not watch.problem


def test_a_look_that_fails_is_told_and_the_next_one_heals() -> None:
    failing = [True]

    def look() -> DirectoryState:
        if failing[0]:
            raise MemoryError
        return DirectoryState()

    watch = DirectoryWatch(look)
    watch.look()
    assert "MemoryError" in watch.state.lost and not watch.state.tagged
    failing[0] = False
    watch.look()
    assert watch.state == DirectoryState()


def test_no_thread_to_be_had_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = DirectoryWatch(DirectoryState)
    with monkeypatch.context() as patched:

        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        watch.keep_watch()
    assert "can't start new thread" in watch.state.lost
    watch.keep_watch()
    wait_until(lambda: watch.state == DirectoryState(), "the watch", 10, 0.001)


@pytest.mark.parametrize(("lost", "fenced"), [("gone", False), ("", True), ("", False)])
def test_claims_are_taken_back(lost: str, fenced: bool) -> None:
    it: Any = SimpleNamespace(
        lost=lost, _base_writer=SimpleNamespace(trouble=Trouble(fenced=fenced))
    )
    told = {"durable_step": 7, "durable_age_seconds": 1.0, "based_step": 5, "term": 2}
    honest = Presence.without_lost_claims(it, told)
    void = bool(lost or fenced)
    assert honest["term"] == 2
    assert honest["durable_step"] == honest["based_step"] or not void
    assert (honest["durable_step"] is None) is void


@pytest.mark.parametrize(
    ("resumed", "fenced", "step"), [(True, False, 150), (False, False, 100), (True, True, None)]
)
def test_a_bucket_claims_what_a_resume_would_take(
    resumed: bool, fenced: bool, step: int | None, tmp_path: Path
) -> None:
    base = Point(1, 100)
    shipper: Any = Shipper(tmp_path, "s3://bucket/run", 0, resumed)
    shipper._bases = SimpleNamespace(
        newest=SimpleNamespace(point=base, entry=SimpleNamespace(step=100))
    )
    shipper._log = SimpleNamespace(step=150)
    shipper._log_keeper = SimpleNamespace(reaches=lambda _: 150)
    shipper.base_worker.trouble = Trouble(fenced=fenced)
    assert shipper.step(PersistState(durable=base)) == step
