"""A shadow of another everystep: its newest step comes through the store, and it is replaced in seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from waiting import wait_until

import everystep
from everystep import connection
from everystep.cli.status import run_status
from everystep.errors import LaneTimeout, NothingToRecover, ProtocolMismatch, ShadowLost
from everystep.lane.host import process_start
from everystep.lane.protocol import PROTOCOL
from everystep.lane.runtime import ShadowCard, read_card, runtime_dir, write_card
from everystep.process import last_words
from everystep.process.config import read_config
from everystep.recover import from_shadow

from .traces import bits, model, sgd, shadows, train_step

STEPS = 5
ATTACH_SECONDS = 10.0  # in all, of a small run
OTHER = """
import everystep.lane.protocol
everystep.lane.protocol.PROTOCOL = {protocol}
"""
# dies with its newest steps in the shadow's memory alone
TRAINER = """
import os, sys
import everystep
from hostile.traces import bits, model, sgd, train_step
net = model(); optimizer = sgd(net)
run = everystep.attach(net, optimizer, run=sys.argv[1], on_lag="wait", durable_every="1h")
for step in run.steps(int(sys.argv[2])):
    train_step(net, optimizer)
sys.stdout.buffer.write(b"".join(bits(net).values()))
sys.stdout.flush()
os._exit(9)
"""


def first_life(run: Path, folder: Path, protocol: int) -> bytes:
    """A trainer and its shadow that both speak another protocol; the trainer's last weights."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OTHER.format(protocol=protocol))
    tests, source = Path(__file__).parent.parent, Path(everystep.__file__).parent.parent
    path = os.pathsep.join(map(str, (folder, source, tests)))
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, str(run), str(STEPS)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 9, done.stderr.decode()[-2000:]
    return done.stdout


def test_a_shadow_of_another_version_is_replaced_and_nothing_lost(
    runtime: Path, tmp_path: Path
) -> None:
    protocol = PROTOCOL + 98
    weights = first_life(tmp_path / "run", tmp_path / "other", protocol)
    card = read_card(runtime_dir(str(tmp_path / "run")))
    assert card is not None and card.protocol == protocol
    wait_until(
        lambda: run_status(tmp_path / "run").get("shadow_step") == STEPS,
        "its notice board to tell the newest step",
    )
    net = model()
    optimizer = sgd(net)
    words = f"shadow {card.pid} speaks protocol {protocol}, this everystep speaks {PROTOCOL}"
    began = time.monotonic()
    with pytest.warns(UserWarning, match=words):
        run = everystep.attach(net, optimizer, run=tmp_path / "run")
    assert time.monotonic() - began < ATTACH_SECONDS, "it was waited for"
    assert run.step == STEPS and b"".join(bits(net).values()) == weights
    assert card.pid not in shadows(runtime) and run.status()["resumed_from"] == "store"
    for _ in run.steps(STEPS + 3):
        train_step(net, optimizer)
    run.close()
    other = model()
    assert everystep.restore(tmp_path / "run", other) == STEPS + 3 and bits(other) == bits(net)


def test_how_long_another_version_may_take() -> None:
    """As docs/GUARANTEES.md says: two seconds to say what it holds, ten to leave, one for each 50 MB."""
    assert last_words._STATUS_SECONDS == 2.0
    assert last_words.allowance_seconds(0) == 10.0
    assert last_words.allowance_seconds(50_000_000) == 11.0
    assert last_words.allowance_seconds(5_000_000_000) == 110.0


def test_a_shadow_of_another_version_that_does_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going on beside it would give up what only it holds: that is for a person to say."""
    first_life(tmp_path / "run", tmp_path / "other", 0)
    card = read_card(runtime_dir(str(tmp_path / "run")))
    assert card is not None
    os.kill(card.pid, signal.SIGSTOP)
    monkeypatch.setattr(last_words, "_STATUS_SECONDS", 0.1)
    monkeypatch.setattr(last_words, "_LEAVE_SECONDS", 0.3)
    net = model()
    with pytest.raises(LaneTimeout, match="still lives") as caught:
        everystep.attach(net, sgd(net), run=tmp_path / "run")
    assert f"kill -9 {card.pid}" in (caught.value.hint or "")
    os.kill(card.pid, signal.SIGCONT)
    wait_until(lambda: process_start(card.pid) != card.start, "it to say its last words")
    with everystep.attach(net, sgd(net), run=tmp_path / "run") as run:
        assert run.step == STEPS


def test_last_words_that_did_not_reach_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that a shadow held and could not leave behind are told, not passed over."""
    path = tmp_path / "run"
    folder = runtime_dir(str(path))
    card = ShadowCard(os.getpid(), process_start(os.getpid()), protocol=PROTOCOL + 1)
    monkeypatch.setattr(
        from_shadow, "last_words", lambda *_: (folder / "shadow.json").unlink() or 7
    )
    write_card(folder, card)
    net = model()
    with pytest.raises(NothingToRecover, match=r"held step 7 and left nothing"):
        everystep.attach(net, sgd(net), run=path)
    optimizer = sgd(net)
    with everystep.attach(net, optimizer, run=path) as run:
        for _ in run.steps(3):
            train_step(net, optimizer)
    write_card(folder, card)
    with pytest.warns(UserWarning, match="held step 7 and left step 3"):
        everystep.attach(net, optimizer, run=path).close()


def test_everystep_changed_while_the_trainer_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer keeps what it has loaded; a shadow that it starts later is what is installed by then."""
    start = connection.start_shadow
    another = lambda **fields: start(**fields, protocol=PROTOCOL + 1)  # noqa: E731
    monkeypatch.setattr(connection, "start_shadow", another)
    net = model()
    with pytest.raises(ShadowLost, match="everystep was changed while the trainer runs") as caught:
        everystep.attach(net, sgd(net), run=tmp_path / "run")
    assert f"protocol {PROTOCOL + 1}" in str(caught.value) and "restart" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_an_opening_that_is_not_understood() -> None:
    said = msgspec.msgpack.encode({"run": 3, "protocol": PROTOCOL})
    for message in (said, b"", b"\xc1", b"\x91" * 5000):
        with pytest.raises(ProtocolMismatch, match="everystep was changed") as caught:
            read_config(message)
        assert "restart the trainer" in (caught.value.hint or "")
