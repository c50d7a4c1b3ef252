"""Every transition that `core/phases.py` lists is shown, in a trainer's process. One that it does not list
costs some recording, and never the training."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep
from everystep.capture import record
from everystep.capture.seals import SealSender
from everystep.capture.state import UserState
from everystep.capture.subject import Subject
from everystep.capture.tap import Tap
from everystep.capture.turn import SealedValues
from everystep.capture.versions import Versions
from everystep.core.cadence import RestBetweenBases
from everystep.core.geometry import Geometry
from everystep.core.phases import TRANSITIONS, Cause, Phase, advance
from everystep.errors import CaptureTooLarge
from everystep.lane.arena import SharedMemory
from everystep.lane.ring import RingReader, RingWriter

Seen = set[tuple[Phase, Cause, Phase]]
_SLOT_BYTES = 64 << 10
_MOVED = re.compile(r"phase from=(\w+) cause=(\w+) to=(\w+)")


class Lane:
    """A tap and its ring. The test stands for the shadow: it reads, and asks for bases."""

    def __init__(self, *, layers: int = 1, slots: int = 8, every: int = 1) -> None:
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))  # 16 KiB each
        self.model[1:].requires_grad_(False)  # part of bases, not of records
        self.optimizer = torch.optim.SGD(self.model[0].parameters(), lr=0.1)
        self.content: dict[str, Any] = {}
        state = UserState({"user": self.content})
        subject = Subject(self.model, self.optimizer, state, log=True, override=())
        self._subject, live = subject, subject.census()
        geometry = Geometry(slots=slots, slot_bytes=_SLOT_BYTES)
        memory = SharedMemory.create(geometry.bytes, "lane")
        ring = RingWriter(memory, geometry, nonce=5)
        self.shadow = RingReader(memory, geometry)
        subject.turn.begin(subject.sealed_values())
        self.tap = Tap(
            subject,
            ring,
            step=0,
            versions=Versions([0] * len(live.tensors)),
            guard=lambda work: work,
            may_wait=lambda *_: False,
            rest=RestBetweenBases(every),
            budget_percent=5.0,
            fingerprint_every=1000,
        )
        self.tap.hooks.install()
        self.tap.record.bases.add(fresh=True)

    def seal(self) -> None:
        moment = self._subject.sealed_values()
        self._subject.turn.begin(moment)
        self.tap.seal(self.tap.step + 1, moment)

    def interrupted_seal(self, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(SealSender, place, interrupt)
            self.seal()

    def step(self) -> None:
        self.model(torch.ones(1, 64)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seal()

    def read(self) -> None:
        while self.shadow.read() is not None:
            pass
        self.shadow.release_read()

    def steps_until(self, phase: Phase, *, reads: bool = False) -> None:
        for _ in range(50):
            if self.tap.phase is phase:
                return
            if reads:
                self.read()
            self.step()
        raise AssertionError(f"never {phase}: {self.tap.phase}")

    def outgrow(self) -> None:
        """Groups and census differ: the next seal finds it."""
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    def ask(self) -> None:
        self.shadow.request_atoms(None)


def one_step_after_the_other(_: pytest.MonkeyPatch) -> None:
    lane = Lane()
    lane.tap.open()
    lane.step()
    lane.ask()
    lane.step()
    lane.outgrow()
    lane.step()
    assert lane.tap.phase is Phase.OUTGROWN


def a_base_in_parts(_: pytest.MonkeyPatch) -> None:
    lane = Lane(layers=40)
    lane.ask()
    lane.tap.open()
    assert lane.tap.phase is Phase.BASING
    lane.read()
    lane.ask()
    lane.step()
    lane.steps_until(Phase.RECORDING, reads=True)


def a_full_ring(_: pytest.MonkeyPatch) -> None:
    lane = Lane()
    lane.tap.open()
    lane.steps_until(Phase.DROPPING)
    dropped = lane.tap.dropped
    assert dropped > 0 and lane.tap.mode[0] == "dropping"
    lane.step()
    assert lane.tap.dropped == dropped + 1
    lane.read()
    lane.step()  # it tells the shadow, which asks for a base
    lane.ask()
    lane.steps_until(Phase.RECORDING, reads=True)


def a_ring_that_is_full_at_once(_: pytest.MonkeyPatch) -> None:
    lane = Lane(layers=40)
    for _ in range(50):
        if lane.tap.phase is Phase.OPENING:
            lane.tap.record.send_base()
    assert lane.tap.phase is Phase.DROPPING and not lane.tap.opened
    lane.outgrow()
    lane.step()
    assert lane.tap.phase is Phase.OUTGROWN


def a_ring_that_is_full_before_the_base_is_sent(_: pytest.MonkeyPatch) -> None:
    lane = Lane(layers=40)
    lane.tap.open()
    assert lane.tap.phase is Phase.BASING
    lane.steps_until(Phase.DROPPING)


def outgrown_before_the_first_seal(_: pytest.MonkeyPatch) -> None:
    lane = Lane()
    lane.outgrow()
    lane.tap.open()
    assert lane.tap.phase is Phase.OUTGROWN


def outgrown_before_the_base_is_sent(_: pytest.MonkeyPatch) -> None:
    lane = Lane(layers=40)
    lane.tap.open()
    lane.outgrow()
    lane.step()
    assert lane.tap.phase is Phase.OUTGROWN


def bases_now_and_then(_: pytest.MonkeyPatch) -> None:
    lane = Lane(every=3)
    lane.tap.open()
    assert lane.tap.phase is Phase.RESTING and lane.tap.mode[0] == "periodic"
    lane.steps_until(Phase.DROPPING)
    assert not lane.tap.is_dropping and lane.tap.dropped == 0
    lane.ask()
    lane.steps_until(Phase.RESTING, reads=True)
    lane.outgrow()
    lane.step()
    assert lane.tap.phase is Phase.OUTGROWN


def interrupted_while_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(every=100)
    lane.tap.open()
    lane.interrupted_seal(monkeypatch, "skip")
    lane.step()
    assert lane.tap.phase is Phase.RESTING
    lane.tap.seal(lane.tap.step, SealedValues(b"", b"", (b"",)), is_awaited=True)
    assert lane.tap.phase is Phase.DROPPING
    lane.interrupted_seal(monkeypatch, "skip")
    lane.step()
    assert lane.tap.phase is Phase.DROPPING


def interrupted_while_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane()
    lane.tap.open()
    lane.interrupted_seal(monkeypatch, "send")
    lane.step()
    assert lane.tap.phase is Phase.DROPPING


def too_large_for_a_slot(_: pytest.MonkeyPatch) -> None:
    """What the seal says does not fit; who waits for the step has it sealed once more all the same."""
    lane = Lane()
    lane.tap.open()
    lane.content["grown"] = bytes(2 * _SLOT_BYTES)
    with pytest.raises(CaptureTooLarge):
        lane.step()
    lane.tap.outgrow()
    lane.tap.seal(lane.tap.step, SealedValues(b"", b"", (b"",)), is_awaited=True)
    assert lane.tap.phase is Phase.OUTGROWN


SCENES: list[Callable[[pytest.MonkeyPatch], None]] = [
    one_step_after_the_other,
    a_base_in_parts,
    a_full_ring,
    a_ring_that_is_full_at_once,
    a_ring_that_is_full_before_the_base_is_sent,
    outgrown_before_the_first_seal,
    outgrown_before_the_base_is_sent,
    bases_now_and_then,
    interrupted_while_nothing_is_recorded,
    interrupted_while_a_step_is_recorded,
    too_large_for_a_slot,
]


def seen(caplog: pytest.LogCaptureFixture) -> Seen:
    found = map(_MOVED.fullmatch, caplog.messages)
    return {(Phase(m[1]), Cause(m[2]), Phase(m[3])) for m in found if m is not None}


def test_every_transition_is_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "everystep")
    for scene in SCENES:
        scene(monkeypatch)
    listed = {(begin, cause, end) for (begin, cause), end in TRANSITIONS.items()}
    assert listed - seen(caplog) == set(), "no scene shows these: add one, or remove them"
    assert seen(caplog) <= listed


@pytest.mark.parametrize("where", ["turn", "flush"])
def test_a_forbidden_transition_costs_a_shadow_and_no_step(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planted = []

    def forbid_once(phase: Phase, cause: Cause) -> Phase:
        if planted and cause is Cause.COMPLETE:
            planted.clear()
            return advance(Phase.OUTGROWN, cause)
        return advance(phase, cause)

    monkeypatch.setattr(record, "advance", forbid_once)
    with everystep.attach(model, optimizer, run=tmp_path / "run") as run:
        for step in run.steps(6):
            if step == 3:
                planted.append(True)
            if step == 3 and where == "flush":
                run._recorder.tap.record.rebase()  # type: ignore[union-attr]
                assert run.flush(60) == 3 and not planted
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4 and where == "turn":
                assert not planted and run.status()["mode"] == "not recording"
                assert "complete while recording is in its phase" in run.status()["problem"]
        assert run.flush(60) == 6 and run.status()["mode"] == "every step"
        assert run.status()["problem"] == ""
    assert "complete while recording is in its phase" in caplog.text
