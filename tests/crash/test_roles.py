"""Every transition of the shadow's roles happens to a real shadow: its log tells them, and no others."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import wait_until

import everystep
from everystep.core.roles import TABLE, Role, RoleEvent
from everystep.lane.control import AskLeave, AskRetire, AskStop, AskYield, Request, ask
from everystep.lane.runtime import ShadowCard, read_card, runtime_dir

from .processes import alive, shadows

_LINE = re.compile(r" role from=(\w+) event=(\w+) to=(\w+)")
Step = tuple[str, str, str]


def transitions(runtime: Path) -> list[Step]:
    """Of all shadows of this test, in the order in which each of them wrote them."""
    return [
        step for file in runtime.rglob("shadow.log") for step in _LINE.findall(file.read_text())
    ]


class Forgotten(Exception):
    """What a trainer dies of."""


class Scene:
    """A small training, and its shadow."""

    def __init__(self, path: Path, **options: object) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.run = everystep.attach(self.model, self.optimizer, run=path, **options)
        self.run.resume()

    def step(self) -> None:
        self.model(torch.randn(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.seal()

    def step_until(self, done: Callable[[], object], what: str) -> None:
        def stepped() -> object:
            self.step()
            return done()

        wait_until(stepped, what)

    @property
    def card(self) -> ShadowCard:
        card = read_card(runtime_dir(str(self.run.path)))
        assert card is not None
        return card

    def ask(self, *requests: Request) -> None:
        card = self.card
        for request in requests:
            assert ask(card.control, request, timeout_seconds=30).error == ""

    def gone(self, pid: int) -> None:
        wait_until(lambda: not alive(pid), f"shadow {pid} to go away")


@contextmanager
def training(path: Path, **options: object) -> Iterator[Scene]:
    """It ends as a trainer does that dies: its shadow stays."""
    scene = Scene(path, **options)
    with pytest.raises(Forgotten), scene.run:
        scene.step_until(lambda: scene.run.status()["warm"], "a warm shadow")
        yield scene
        raise Forgotten


def close(path: Path) -> None:
    with training(path) as scene:
        scene.run.close()


def idle(path: Path) -> None:
    with training(path, tuning=everystep.Tuning(idle_exit="1s")) as scene:
        pid = scene.card.pid
    scene.gone(pid)


def terminated(path: Path) -> None:
    with training(path) as scene:
        pid = scene.card.pid
        os.kill(pid, signal.SIGTERM)
        scene.gone(pid)


def grown(path: Path) -> None:
    """The trainer goes on with another shadow."""
    with training(path) as scene:
        pid = scene.card.pid
        scene.model.grown = nn.Parameter(torch.ones(3))
        scene.optimizer.add_param_group({"params": [scene.model.grown]})
        scene.step()
        scene.run.flush(60)
        scene.gone(pid)


def resumed(path: Path) -> None:
    with training(path) as scene:
        pid = scene.card.pid
    with training(path) as scene:
        assert scene.run.status()["resumed_from"] == "shadow"
        scene.gone(pid)


def stopped(path: Path) -> None:
    with training(path) as scene:
        pass
    scene.ask(AskStop())


def rewound(path: Path) -> None:
    with training(path) as scene:
        pass
    scene.ask(AskRetire())


def taken_by_one_that_died(path: Path) -> None:
    """Who forgot its run, as in a notebook, asks for it while it lives; then nobody comes back."""
    with training(path) as scene:
        scene.ask(AskYield(), AskYield(), AskLeave(), AskStop())


def terminated_after_a_yield(path: Path) -> None:
    with training(path) as scene:
        pid = scene.card.pid
    scene.ask(AskYield())
    os.kill(pid, signal.SIGTERM)
    scene.gone(pid)


def follower_that_is_not_needed(path: Path) -> None:
    with training(path) as scene:
        recorder = scene.run._recorder
        follower = recorder._connection_beside(recorder.census())
        follower.shadow.ask(AskRetire(), timeout_seconds=30)
        assert follower.shadow.wait_gone(30)
        follower.close()


def follower_whose_trainer_left(path: Path) -> None:
    """It holds no whole state: the run is left to the shadow that speaks for it."""
    with training(path) as scene:
        recorder, before = scene.run._recorder, scene.card
        follower = recorder._connection_beside(recorder.census())
        follower.shadow.ask(AskLeave(), timeout_seconds=30)
        assert follower.shadow.wait_gone(30)
        follower.close()
        assert scene.card == before, "it still speaks"


FOLLOWING, SPEAKING, ORPHANED, YIELDED = (role for role in Role if role is not Role.LEAVING)
E = RoleEvent
SCENES: dict[Callable[[Path], None], list[tuple[Role, RoleEvent]]] = {
    close: [(FOLLOWING, E.SPEAKS), (SPEAKING, E.CLOSED)],
    idle: [(FOLLOWING, E.SPEAKS), (SPEAKING, E.TRAINER_GONE), (ORPHANED, E.ENDS)],
    terminated: [(FOLLOWING, E.SPEAKS), (SPEAKING, E.ENDS)],
    grown: [(FOLLOWING, E.SPEAKS), (SPEAKING, E.RETIRED)],
    resumed: [(SPEAKING, E.TRAINER_GONE), (ORPHANED, E.YIELDS), (YIELDED, E.RETIRED)],
    stopped: [(SPEAKING, E.TRAINER_GONE), (ORPHANED, E.CLOSED)],
    rewound: [(SPEAKING, E.TRAINER_GONE), (ORPHANED, E.RETIRED)],
    taken_by_one_that_died: [
        (SPEAKING, E.YIELDS),
        (YIELDED, E.YIELDS),
        (YIELDED, E.TRAINER_GONE),
        (YIELDED, E.CLOSED),
    ],
    terminated_after_a_yield: [(ORPHANED, E.YIELDS), (YIELDED, E.ENDS)],
    follower_that_is_not_needed: [(FOLLOWING, E.RETIRED)],
    follower_whose_trainer_left: [(FOLLOWING, E.TRAINER_GONE), (FOLLOWING, E.ENDS)],
}


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_of_roles(scene: Callable[[Path], None], runtime: Path, tmp_path: Path) -> None:
    scene(tmp_path / "run")
    for pid in shadows(runtime):  # those that nobody needs any more
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not shadows(runtime), "all shadows to go away")
    seen = transitions(runtime)
    pairs = [(role, event) for role, event, _ in seen]
    assert set(SCENES[scene]) <= set(pairs), pairs
    assert {(role, event): to for role, event, to in seen}.items() <= TABLE.items()


def test_every_transition_of_the_table_is_in_a_scene() -> None:
    assert set(itertools.chain(*SCENES.values())) == set(TABLE)


# while the file is there, the shadow is told at every turn that it speaks, which it does already
FORBIDDEN = """
import os
from everystep.core.roles import RoleEvent
from everystep.shadow import process, succession
look_around = succession.Succession.look_around

def twice(self, **facts):
    look_around(self, **facts)
    if os.path.exists({file!r}):
        self.happens(RoleEvent.SPEAKS)

succession.Succession.look_around = twice
process._HEALED_SECONDS = 1.0
"""


def test_a_forbidden_transition_is_told_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted, site = tmp_path / "planted", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FORBIDDEN.format(file=str(planted)))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])  # the shadow's as well
    scene = Scene(tmp_path / "run")

    def told(words: str) -> bool:
        return any(words in record.getMessage() for record in caplog.records)

    scene.step_until(lambda: scene.run.status()["warm"], "a warm shadow")
    planted.touch()
    why = "ForbiddenTransition: a shadow that is speaking: found speaks"
    scene.step_until(lambda: told(why), "a warning in the trainer")
    status = scene.run.status()
    assert status["health"] == "degraded" and why in status["problem"]
    planted.unlink()
    scene.step_until(lambda: told("all is well again"), "the end of it")
    assert scene.run.flush(60) == scene.run.step
    assert scene.run.status()["health"] == "ok"
    scene.run.close()
