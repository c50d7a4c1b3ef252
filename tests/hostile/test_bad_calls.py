"""Calls at the wrong time, a second trainer, everystep switched off, gradients that are no numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import everystep
from everystep.errors import RunBusy, UsageError

from .traces import adam, bits, locked, model, shadows, train_step


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
        with pytest.raises(UsageError, match=r"steps\(3\).*already at step 4"):
            run.steps(3)
        assert list(run.steps(4)) == [] and run.step == 4
        assert run.status()["records_let_go"] == 0
    for call in (run.seal, run.resume, run.flush, lambda: run.steps(9)):
        with pytest.raises(UsageError, match="closed"):
            call()  # type: ignore[operator]
    run.close()  # a second close is no error
    other = model()
    assert everystep.restore(tmp_path / "run", other, adam(other)) == 4
    assert bits(other) == bits(net)
    with (
        everystep.attach(other, adam(other), run=tmp_path / "run") as again,
        pytest.raises(UsageError, match=r"steps\(2\).*already at step 4"),
    ):
        again.steps(2)
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
        assert bits(net) == before
        out, _ = first.communicate("\n", timeout=60)
    finally:
        first.kill()
        first.wait()
    assert out == "done\n" and first.returncode == 0
    assert everystep.open_run(run).steps[-1] == 6


def test_second_attach_in_one_process(runtime: Path, tmp_path: Path) -> None:
    """A lock of the kernel does not stop its own process; the run must be as safe all the same."""
    net, other = model(), model()
    optimizer = adam(net)
    with everystep.attach(net, optimizer, run=tmp_path / "run") as run:
        for _ in run.steps(3):
            train_step(net, optimizer)
        with pytest.raises(RunBusy):
            everystep.attach(other, adam(other), run=tmp_path / "run")
        assert len(locked(runtime)) == 1, "the refused attach took the lock away"
        assert len(shadows(runtime)) == 1
        for _ in run.steps(6):
            train_step(net, optimizer)
    assert everystep.restore(tmp_path / "run", other) == 6
    assert bits(other) == bits(net)


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
