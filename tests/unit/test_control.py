"""A question to a shadow is asked once, and a shadow that leaves after its answer was heard."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everystep.errors import LaneTimeout, ShadowLost
from everystep.lane.control import AskClose
from everystep.shadow.spawn import ShadowHandle

_SHADOW = """
import sys, time
from everystep.lane.control import Answer, ControlServer
server = ControlServer(sys.argv[1])
print("ready", flush=True)
while (received := server.receive()) is None:
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
if sys.argv[3] == "answers":
    server.answer(received[0], Answer(status={"step": received[1].step}))
    server.close()
"""


@contextmanager
def shadow_that(does: str, folder: Path, *, after: float) -> Iterator[ShadowHandle]:
    """A process that hears one question and is gone that many seconds later."""
    address = f"ipc://{folder}/a.control"
    command = [sys.executable, "-c", _SHADOW, address, str(after), does]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        handle = ShadowHandle(process.pid, address)
        try:
            yield handle
        finally:
            handle.close()
            process.kill()


@pytest.mark.parametrize("seconds", [0.0, 2.5])
def test_the_one_answer_of_a_shadow_that_leaves_is_heard(tmp_path: Path, seconds: float) -> None:
    with shadow_that("answers", tmp_path, after=seconds) as shadow:
        answer = shadow.ask(AskClose(7), timeout_seconds=60)
        assert answer.status == {"step": 7}
        assert shadow.wait_gone(10)


def test_a_shadow_that_dies_unheard_is_noticed(tmp_path: Path) -> None:
    with shadow_that("dies", tmp_path, after=0.2) as shadow:
        began = time.monotonic()
        with pytest.raises(
            ShadowLost, match=r"close: it died before it answered\nhint: .*shadow.log"
        ):
            shadow.ask(AskClose(7), timeout_seconds=60)
        assert time.monotonic() - began < 30


def test_a_shadow_that_does_not_answer_is_not_waited_for_longer_than_asked(tmp_path: Path) -> None:
    with (
        shadow_that("answers", tmp_path, after=30) as shadow,
        pytest.raises(LaneTimeout, match=r"no answer in 0\.5 s"),
    ):
        shadow.ask(AskClose(7), timeout_seconds=0.5)
