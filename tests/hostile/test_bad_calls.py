"""Calls at the wrong time, a second trainer, everystep switched off, gradients that are no numbers."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import wait_until

import everystep
from everystep.errors import LaneError, NothingToRecover, RunBusy, RunHasSteps, UsageError
from everystep.lane import lock
from everystep.lane.control import AskStatus, ask
from everystep.lane.runtime import read_card, runtime_dir

from .traces import adam, bits, leaves_nothing, locked, model, shadows, train_step


def test_seal_and_steps_at_the_wrong_time(runtime: Path, tmp_path: Path) -> None:
    net = model()
    optimizer = adam(net)
    with everystep.attach(net, optimizer, run=tmp_path / "run") as run:
        for step in range(run.resume(), 2):
            train_step(net, optimizer)
            run.seal()
            with pytest.raises(UsageError, match=f"seal called twice at step {step + 1}"):
                run.seal()
        for _ in run.steps(4):
            train_step(net, optimizer)
            with pytest.raises(UsageError, match=r"steps\(\) seals every step"):
                run.seal()
        assert list(run.steps(3)) == [] and run.step == 4
        assert list(run.steps(4)) == [] and run.step == 4
        assert run.status()["records_dropped"] == 0
    for call in (run.seal, run.resume, run.flush, lambda: run.steps(9)):
        with pytest.raises(UsageError, match="closed"):
            call()  # type: ignore[operator]
    run.close()  # a second close is no error
    other = model()
    assert everystep.restore(tmp_path / "run", other, adam(other)) == 4
    assert bits(other) == bits(net)
    with everystep.attach(other, adam(other), run=tmp_path / "run") as again:
        assert list(again.steps(2)) == [] and again.step == 4
    assert everystep.open_run(tmp_path / "run").steps[-1] == 4


def by_argument(_: pytest.MonkeyPatch) -> dict[str, bool]:
    return {"enabled": False}


def by_environment(patch: pytest.MonkeyPatch) -> dict[str, bool]:
    patch.setenv("EVERYSTEP_DISABLE", "1")
    return {}


@pytest.mark.parametrize("how", [by_argument, by_environment])
def test_disabled_installs_and_starts_nothing(
    how: Callable[[pytest.MonkeyPatch], dict[str, bool]],
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = model()
    optimizer = adam(net)
    with everystep.attach(net, optimizer, run=tmp_path / "run", **how(monkeypatch)) as run:
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert [step for step in run.steps(3) if train_step(net, optimizer) is None] == [0, 1, 2]
        assert run.step == 3 and run.flush() == 3
        assert "disabled" in run.status()["summary"]
        assert shadows(runtime) == []
    assert not (tmp_path / "run").exists() and list(runtime.iterdir()) == []


HOLD = """
import sys
sys.path.insert(0, sys.argv[2])
import everystep
from hostile.traces import adam, model, train_step
net = model(); optimizer = adam(net)
with everystep.attach(net, optimizer, run=sys.argv[1]) as run:
    for step in run.steps(6):
        train_step(net, optimizer)
        if step == 2:
            print("held", flush=True)
            sys.stdin.readline()
print("done", flush=True)
"""


def lose_meeting_place(folder: Path, run: Path, net: nn.Module, trainer: int) -> None:
    """A cleaner of temporary files, or a person: first the lock goes, then everything where processes meet.
    The trainer stays the only one, and its shadow can still be asked."""
    (folder / "trainer.lock").unlink()
    with pytest.raises(RunBusy, match=f"pid {trainer}"):
        everystep.attach(net, adam(net), run=run)
    shutil.rmtree(folder)
    card = wait_until(lambda: read_card(folder), "a shadow that can be found")
    with pytest.raises(RunBusy, match=f"pid {trainer}"):
        everystep.attach(net, adam(net), run=run)
    for request in (AskStatus(), AskStatus(exact=True)):
        answer = ask(card.control, request, timeout_seconds=60)
        assert answer.status["trainer_pid"] == trainer


def test_second_trainer_is_refused_and_the_first_unharmed(runtime: Path, tmp_path: Path) -> None:
    run, here = tmp_path / "run", Path(__file__).resolve().parent.parent
    words = [sys.executable, "-c", HOLD, str(run), str(here)]
    first = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        held, net = shadows(runtime), model()
        before = bits(net)
        for _ in range(2):
            with pytest.raises(RunBusy, match=f"pid {first.pid}"):
                everystep.attach(net, adam(net), run=run)
        assert shadows(runtime) == held and len(held) == 1 and len(locked(runtime)) == 1
        lose_meeting_place(runtime_dir(str(run)), run, net, first.pid)
        assert bits(net) == before
        out, _ = first.communicate("\n", timeout=120)
    finally:
        first.kill()
        first.wait()
    assert out == "done\n" and first.returncode == 0
    assert everystep.open_run(run).steps[-1] == 6


def open_to_all(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)


def a_link(root: Path) -> None:
    (root.parent / f"{root.name}-of-others").mkdir(mode=0o700)
    root.symlink_to(f"{root.name}-of-others")


def of_nobody(root: Path) -> None:
    root.mkdir()
    os.chown(root, 65534, 65534)


ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.mark.parametrize("spoil", [open_to_all, a_link, pytest.param(of_nobody, marks=ROOT)])
def test_nothing_is_made_in_what_takes_the_place_of_the_root(
    spoil: Callable[[Path], None],
    runtime: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cleaner removed it under a living run, and somebody else was quicker: lock, card and sockets stay
    away from there, trainer and status say so, and all is well once the stranger has gone."""
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0)
    net = model()
    optimizer = adam(net)
    run = everystep.attach(net, optimizer, run=tmp_path / "run", on_lag="wait")
    run.resume()

    def until(done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, what
            train_step(net, optimizer)
            run.seal()
            time.sleep(0.02)

    until(lambda: run.step == 2, "two steps")
    folder, held = runtime_dir(str(run.path)), shadows(runtime)
    shutil.rmtree(runtime)
    spoil(runtime)
    (runtime / folder.name).mkdir()  # its name is no secret
    try:
        until(lambda: "nobody can find this shadow" in caplog.text, "the trainer does not tell")
        status = run.status()
        assert status["health"] == "degraded" and str(runtime) in status["problem"]
        time.sleep(2.5)  # each of them looks once a second
        until(lambda: run.step > 5, "training goes on")
        assert list(runtime.rglob("*")) == [folder], "something was made there"
        with pytest.raises(LaneError, match=str(runtime)):
            run.flush(30)
    finally:
        remove(runtime)
    until(lambda: read_card(folder) is not None, "nobody can find the shadow")
    until(lambda: run.status()["health"] == "ok", "it is well again")
    assert folder.stat().st_mode & 0o777 == 0o700 and len(locked(runtime)) == 1
    assert run.flush(60) == run.step and shadows(runtime) == held
    run.close()


def remove(root: Path) -> None:
    behind = root.resolve()
    root.unlink() if root.is_symlink() else None
    shutil.rmtree(behind)


ALWAYS_FRESH = """
from everystep.shadow import presence
presence.FRESH_SECONDS = 0.0
"""


def test_where_processes_meet_never_grows_old(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleaners of temporary folders go by the age of files: lock, card and sockets, of trainer and shadow."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ALWAYS_FRESH)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])  # the shadow's as well
    monkeypatch.setattr(lock, "FRESH_SECONDS", 0.0)
    net = model()
    optimizer = adam(net)
    with everystep.attach(net, optimizer, run=tmp_path / "run") as run:
        for _ in run.steps(2):
            train_step(net, optimizer)
        old = list(runtime_dir(str(run.path)).iterdir())
        kinds = {".json", ".lock", ".log", ".control", ".board", ".memory"}
        assert {path.suffix for path in old} == kinds
        for path in old:
            os.utime(path, (1, 1))
        deadline = time.monotonic() + 60
        for _ in run.steps(1_000_000):
            train_step(net, optimizer)
            left = [path.name for path in old if path.stat().st_mtime == 1]
            if not left:
                break
            assert time.monotonic() < deadline, f"nobody has touched {left}"
            time.sleep(0.02)


def test_who_lost_the_run_to_another_trainer_stops_recording(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock file was removed, its shadow is dead, and another trainer was quicker: one of them must not
    write, and says so."""
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 0)
    monkeypatch.setattr(lock, "_TAKEN_SECONDS", 0)
    run, here = tmp_path / "run", Path(__file__).resolve().parent.parent
    net = model()
    optimizer = adam(net)
    with everystep.attach(net, optimizer, run=run) as ours:
        for _ in ours.steps(2):
            train_step(net, optimizer)
        (runtime_dir(str(run)) / "trainer.lock").unlink()
        for pid in shadows(runtime):
            os.kill(pid, signal.SIGKILL)
        words = [sys.executable, "-c", HOLD, str(run), str(here)]
        other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            with pytest.warns(
                UserWarning, match=f"another trainer holds the run now .*{other.pid}"
            ):
                for _ in ours.steps(6):
                    train_step(net, optimizer)
            status = ours.status()
            assert status["mode"] == "not recording" and str(other.pid) in status["problem"]
            assert len(shadows(runtime)) == 1, "two shadows write one run"
            other.communicate("\n", timeout=120)
        finally:
            other.kill()
            other.wait()
    assert other.returncode == 0 and everystep.open_run(run).verify().problems == []


@pytest.mark.parametrize("forgotten", [False, True])
def test_second_attach_in_one_process(forgotten: bool, runtime: Path, tmp_path: Path) -> None:
    """As in a notebook whose cell is run again: the earlier Run, perhaps out of reach, is closed and told."""
    net, other = model(), model()
    optimizer, second = adam(net), adam(other)
    run: everystep.Run | None = everystep.attach(net, optimizer, run=tmp_path / "run")
    assert run is not None
    for step in run.steps(9):
        train_step(net, optimizer)
        if step == 2:
            break  # in the middle of a turn: it is not sealed
    hooks = len(optimizer._optimizer_step_pre_hooks)
    earlier = run
    if forgotten:
        run = earlier = None
        gc.collect()
    with pytest.warns(UserWarning, match="closed at step 2"):
        run = everystep.attach(other, second, run=tmp_path / "run")
    assert run.step == 2 and run.status()["resumed_from"] == "shadow"
    assert len(optimizer._optimizer_step_pre_hooks) < hooks, "the earlier Run still listens"
    if earlier is not None:
        for call in (earlier.resume, earlier.seal, earlier.flush):
            with pytest.raises(UsageError, match="closed by a later attach"):
                call()
        earlier.close()  # no error, and no harm to the later one
    assert len(locked(runtime)) == 1
    for _ in run.steps(6):
        train_step(other, second)
    run.close()
    fresh = model()
    assert everystep.restore(tmp_path / "run", fresh) == 6
    assert bits(fresh) == bits(other) and shadows(runtime) == []


def test_everything_of_the_earlier_run_is_gone(runtime: Path, tmp_path: Path) -> None:
    """Also model and optimizer were dropped: nothing is left to close, and the run is free."""
    net = model()
    optimizer = adam(net)
    for _ in everystep.attach(net, optimizer, run=tmp_path / "run").steps(2):
        train_step(net, optimizer)
    del net, optimizer
    gc.collect()
    net = model()
    with everystep.attach(net, adam(net), run=tmp_path / "run") as run:
        assert run.step == 2 and run.status()["resumed_from"] == "shadow"


def test_resume_never_and_must(runtime: Path, tmp_path: Path) -> None:
    run, net = tmp_path / "run", model()
    with leaves_nothing(runtime, run, net), pytest.raises(NothingToRecover, match="must"):
        everystep.attach(net, adam(net), run=run, resume="must")
    optimizer = adam(net)
    with everystep.attach(net, optimizer, run=run, resume="never") as ours:
        for _ in ours.steps(2):
            train_step(net, optimizer)
    other = model()
    with leaves_nothing(runtime, run, other), pytest.raises(RunHasSteps, match="step 2"):
        everystep.attach(other, adam(other), run=run, resume="never")
    with everystep.attach(other, adam(other), run=run, resume="must") as ours:
        assert ours.step == 2 and bits(other) == bits(net)
    with pytest.raises(UsageError, match="resume"):
        everystep.attach(net, adam(net), run=run, resume="perhaps")


def test_ranks_without_a_process_group(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchrun sets before anybody has called init_process_group."""
    net = model()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with leaves_nothing(runtime, tmp_path / "run", net), pytest.raises(UsageError) as caught:
        everystep.attach(net, adam(net), run=tmp_path / "run")
    assert "WORLD_SIZE=2" in str(caught.value) and not isinstance(caught.value, RunBusy)
    assert "init_process_group before attach" in (caught.value.hint or "")
    monkeypatch.setenv("WORLD_SIZE", "1")
    everystep.attach(net, adam(net), run=tmp_path / "run").close()


def test_a_job_of_many_ranks_is_refused(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is said to anybody through its rendezvous store."""
    net = model()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with (
        leaves_nothing(runtime, tmp_path / "run", net),
        pytest.raises(UsageError, match="2 ranks"),
    ):
        everystep.attach(net, adam(net), run=tmp_path / "run")


def test_nan_gradients_are_kept_bit_for_bit(runtime: Path, tmp_path: Path) -> None:
    net = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    odd = [0x7FC00001, 0x7F800001, -0x3FFFFF, 0x7F800000, -0x800000, 1, -0x7FFFFFFF, 0]
    pattern = torch.tensor(odd * 2, dtype=torch.int32).view(torch.float32).view(4, 4)
    with everystep.attach(net, optimizer, run=tmp_path / "run") as run:
        for _ in run.steps(3):
            net.weight.grad = pattern.clone()
            optimizer.step()
        assert run.status()["repairs"] == 0, "the replica had to be repaired"
    assert torch.isnan(net.weight).any()
    again = nn.Linear(4, 4, bias=False)
    other = torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9)
    assert everystep.restore(tmp_path / "run", again, other) == 3
    assert bits(again) == bits(net)
    buffers = [
        o.state[p]["momentum_buffer"] for o, p in ((optimizer, net.weight), (other, again.weight))
    ]
    assert torch.equal(*(b.view(torch.int32) for b in buffers))
