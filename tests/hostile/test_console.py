"""What a person at the console is told without asking: a line at a resume or a finished job, and `repr`."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from pathlib import Path

import pytest
from waiting import wait_until

import everystep
from everystep.console import announce

from .traces import adam, model, shadows, train_step


class Interrupted(Exception):
    pass


def resumed(told: str) -> list[tuple[str, ...]]:
    return re.findall(
        r"^everystep: resumed (\S+) at step (\d+) from the (\w+) \((\w+)\)(.*)$", told, re.M
    )


def test_lines_of_a_runs_lives(
    tmp_path: Path, runtime: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Interrupted, resumed from the shadow, finished, started again with the same and a smaller total."""
    path = tmp_path / "run"
    net = model()
    optimizer = adam(net)
    with pytest.raises(Interrupted), everystep.attach(net, optimizer, run=path) as run:
        for step in run.steps(9):
            if step == 3:
                raise Interrupted
            train_step(net, optimizer)
        assert not resumed(capfd.readouterr().err), "a new run resumes nothing"
    with everystep.attach(net, optimizer, run=path) as run:
        assert resumed(capfd.readouterr().err) == [
            (str(path), "3", "shadow", "exact", "; 0 steps lost")
        ]
        for _ in run.steps(5):
            train_step(net, optimizer)
        check_repr(run, runtime)
    assert repr(run) == f"<everystep.Run {path} at step 5: closed>"
    with everystep.attach(net, optimizer, run=path, enabled=False) as off:
        assert repr(off) == f"<everystep.Run {path} at step 0: disabled>"
    with everystep.attach(net, optimizer, run=path) as run:
        assert resumed(capfd.readouterr().err) == [(str(path), "5", "store", "exact", "")]
        assert list(run.steps(5)) == []
        assert "nothing left to do" not in capfd.readouterr().err
        assert list(run.steps(2)) == [] and run.step == 5
        told = capfd.readouterr().err
        assert f"everystep: {path} is at step 5: steps(2) has nothing left to do" in told
    assert everystep.open_run(path).steps[-1] == 5


def threads_of(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/stat"))


def check_repr(run: everystep.Run, runtime: Path) -> None:
    """It says run, step and tiers, and does not wait for a shadow that does not answer."""
    run.flush(60)
    deadline = time.monotonic() + 30
    tiers = r"process dies → step \d; host dies → step 5, \d s old; exact"
    while not re.fullmatch(
        rf"<everystep\.Run {run.path} at step 5: every step; {tiers}>", repr(run)
    ):
        assert time.monotonic() < deadline, repr(run)
        time.sleep(0.05)
    (pid,) = shadows(runtime)
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        return all(s.read_text().rpartition(")")[2].split()[0] == "T" for s in threads_of(pid))

    wait_until(stopped, "a shadow that stands still")
    began = time.monotonic()
    told = repr(run)
    waited = time.monotonic() - began
    os.kill(pid, signal.SIGCONT)
    assert waited < 3, "status waits for five"
    assert f"{run.path} at step 5: every step; the shadow did not say" in told


def test_lost_steps_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Between two bases of a run without a log nothing is recorded; the next life is told what that cost."""
    path, sealed = tmp_path / "run", 6
    net = model()
    optimizer = adam(net)
    with (
        pytest.raises(Interrupted),
        everystep.attach(net, optimizer, run=path, every=1000, on_failure="raise") as run,
    ):
        for step in run.steps(9):
            if step == 1:
                run.flush(60)
            if step == sealed:
                raise Interrupted
            train_step(net, optimizer)
    capfd.readouterr()
    with everystep.attach(net, optimizer, run=path, every=1000):
        ((_, step, _, _, lost),) = resumed(capfd.readouterr().err)
    assert int(step) < sealed, "this test shows nothing"
    assert lost == f"; {sealed - int(step)} steps lost"


def test_told_where_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Printed as long as nobody configured logging for it; logged where somebody did; once in either case."""
    announce("one")
    assert capfd.readouterr().err == "everystep: one\n" and not caplog.messages
    with caplog.at_level(logging.INFO):
        announce("two")
    assert not capfd.readouterr().err and caplog.messages == ["two"]
    own = logging.NullHandler()
    logging.getLogger("everystep").addHandler(own)
    announce("three")
    logging.getLogger("everystep").removeHandler(own)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("said", "quiet"),
    [
        *((words, True) for words in ("1", "true", "True", "YES", " on ")),
        *((words, False) for words in ("", "0", "false", "False", "no", "No", "off", "maybe")),
    ],
)
def test_quiet_is_a_switch_as_others_are(
    said: str, quiet: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is not understood silences nothing."""
    monkeypatch.setenv("EVERYSTEP_QUIET", said)
    announce("one")
    assert capfd.readouterr().err == ("" if quiet else "everystep: one\n")
