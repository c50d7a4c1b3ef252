"""Recording that is in trouble is told in the trainer, whatever the cause: nobody looks at a status before a
crash."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import everystep
from everystep.recorder import Recorder

_DEADLINE_SECONDS = 60.0


class Training:
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


def test_a_store_that_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(tmp_path / "run", durable_every=1)
    training.run.flush(60)
    bases = next((tmp_path / "run" / "epochs").glob("*/bases"))
    bases.rename(bases.with_name("moved"))
    bases.write_text("not a directory")
    told = training.until_told(caplog, "everystep status")
    assert "it is a file, expected a folder" in told, told
    bases.unlink()
    bases.with_name("moved").rename(bases)
    training.until_told(caplog, "all is well again")
    training.run.close()


def test_a_close_that_does_not_finish_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ended it: a close without a word means that everything is durable."""
    training = Training(tmp_path / "run")
    monkeypatch.setattr(Recorder, "finish", lambda self: None)
    with pytest.warns(UserWarning, match="the last steps were not written"):
        training.run.close()
