"""Recording that is in trouble is told in the trainer, whatever the cause: nobody looks at a status before a
crash."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import status_when

import everystep
from everystep import connection, sealed, waiting
from everystep.capture.tap import Tap
from everystep.core import patience
from everystep.errors import LaneTimeout
from everystep.sealed import Sealed

_DEADLINE_SECONDS = 60.0
# a shadow that fails at one record while it is in step, and is soon taken for well again
FAILING = """
from everystep.shadow import process
from everystep.shadow.tuning import Tuner
plain = Tuner.on_record
def fail(self, seal, entries):
    if seal.step == 3:
        raise ZeroDivisionError("planted")
    plain(self, seal, entries)
Tuner.on_record = fail
process._HEALED_SECONDS = 1.0
"""


class Training:
    def __init__(self, path: Path, **options: object) -> None:
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        given = {"every": 1, **options}
        self.run = everystep.attach(self.model, self.optimizer, run=path, **given)
        self.run.resume()

    def step(self) -> None:
        self.model(torch.randn(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.seal()

    def until_told(self, caplog: pytest.LogCaptureFixture, words: str) -> str:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while time.monotonic() < deadline:
            self.step()
            time.sleep(0.01)
            found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
            if told := [text for text in found if words in text]:
                return told[0]
        raise AssertionError(f"nothing was told of {words!r}")


def test_a_shadow_that_dies_and_one_that_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path / "run")
    training.step()
    os.kill(training.run.status()["pid"], signal.SIGKILL)
    told = training.until_told(caplog, "steps are not recorded")
    assert "is gone" in told and str(tmp_path / "run") in told
    training.until_told(caplog, "all is well again")
    training.run.close()


def test_a_shadow_that_stands_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(tmp_path / "run", on_lag="drop")
    training.run.flush(60)
    pid = training.run.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    told = training.until_told(caplog, "steps are not recorded")
    os.kill(pid, signal.SIGCONT)
    assert 'on_lag="wait"' in told
    training.until_told(caplog, "all is well again")
    training.run.close()


def test_a_shadow_that_stands_still_is_waited_for_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each wait: training stands still meanwhile, and nothing else tells why."""
    monkeypatch.setattr(connection, "_SILENT_SECONDS", 0.5)
    training = Training(tmp_path / "run", on_lag="wait")
    training.run.flush(60)
    pid = training.run.status()["pid"]
    for waits in (1, 2):
        os.kill(pid, signal.SIGSTOP)
        wakes = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
        wakes.start()
        while wakes.is_alive():
            training.step()
        told = [text for r in caplog.records if "training waits" in (text := r.getMessage())]
        assert len(told) == waits, told
        assert f"run {tmp_path / 'run'}, step " in told[-1]
        assert re.search(rf"until \d\d:\d\d:\d\d for shadow {pid} to read it", told[-1])
        assert f"it is stopped: kill -CONT {pid} wakes it" in told[-1]
    assert training.run.flush(60) == training.run.step
    assert training.run.status()["records_dropped"] == 0
    training.run.close()


def test_a_shadow_that_stands_still_is_told_while_a_base_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(connection, "WAIT_SECONDS", 1.0)
    training = Training(tmp_path / "run")
    pid = training.run.status()["pid"]
    link = training.run._recorder.link.connection
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 1.0
        with pytest.raises(LaneTimeout):
            while True:
                link.pause(deadline, "flush: a base of step 1 is sent")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert caplog.text.count("a base of step 1 is sent: training waits until") == 1
    assert f"kill -CONT {pid}" in caplog.text
    training.run.close()


def test_a_shadow_that_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever failed in it: it is told, and recording goes on by itself."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAILING)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])  # the shadow's as well
    training = Training(tmp_path / "run")
    for _ in range(3):
        training.step()
    status_when(training.run, lambda told: "starts over" in told["problem"], _DEADLINE_SECONDS)
    time.sleep(0.5)  # it has asked for a new base: the very next record brings it
    told = training.until_told(caplog, "starts over from a new base")
    assert "ZeroDivisionError: planted" in told and str(tmp_path / "run") in told
    training.until_told(caplog, "all is well again")
    assert training.run.flush(60) == training.run.step
    training.run.close()


def test_recording_that_slows_training_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Tap.seal

    def slow(*given: object, **named: object) -> None:
        time.sleep(0.01)
        plain(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Tap, "seal", slow)
    training = Training(tmp_path / "run", overhead_budget_percent=20.0)
    told = training.until_told(caplog, "recording slows training by")
    assert "overhead_budget_percent=20" in told and "every=10" in told
    assert training.run.status()["slowdown_percent"] > 20
    for _ in range(100):
        training.step()
    assert caplog.text.count("recording slows training by") == 1
    training.run.close()


def test_a_store_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(tmp_path / "run", durable_every=1)
    training.run.flush(60)
    bases = next((tmp_path / "run" / "terms").glob("*/bases"))
    bases.rename(bases.with_name("moved"))
    bases.write_text("not a directory")
    told = training.until_told(caplog, "it is a file, expected a folder")
    assert "everystep status" in told, told
    bases.unlink()
    bases.with_name("moved").rename(bases)
    training.until_told(caplog, "all is well again")
    training.run.close()


def test_a_close_that_does_not_finish_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ended it: a close without a word means that everything is durable."""
    training = Training(tmp_path / "run")
    monkeypatch.setattr(Sealed, "finish", lambda self: None)
    with pytest.warns(UserWarning, match="the last steps were not written"):
        training.run.close()


@pytest.mark.parametrize("operation", ["flush", "close"])
def test_a_shadow_that_does_not_write_is_not_waited_for_without_end(
    operation: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nor in silence: what is waited for is said, and in the end what it stands at."""
    monkeypatch.setattr(patience, "TELL_SECONDS", 1.0)
    monkeypatch.setattr(waiting, "DurableWait", partial(waiting.DurableWait, still=4.0))
    monkeypatch.setattr(sealed, "DurableWait", waiting.DurableWait)
    training = Training(tmp_path / "run", on_failure="raise")
    training.run.flush(60)
    training.step()
    pid = training.run.status()["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(LaneTimeout, match=rf"{operation} .*: step 1 is not written") as caught:
            getattr(training.run, operation)()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert f"kill -CONT {pid}" in (caught.value.hint or "")
    told = capsys.readouterr().err
    assert f"{operation} {tmp_path / 'run'}: waiting until step 1 is written" in told
    monkeypatch.undo()
    training.run.close()
