"""A question to a shadow is asked once, and a shadow that leaves after its answer was heard. What is not
understood, of another version or nonsense, is refused at once and in words."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from everystep.errors import LaneTimeout, ProtocolMismatch, ShadowLost
from everystep.lane.control import (
    Answer,
    AskClose,
    AskDefer,
    AskRetire,
    AskStatus,
    ControlServer,
    NoticeBoard,
    Request,
    ask,
    board_address,
)
from everystep.lane.protocol import PROTOCOL
from everystep.lane.runtime import ShadowCard
from everystep.process.config import ShadowConfig
from everystep.process.spawn import ShadowHandle

SEED = int(os.environ.get("EVERYSTEP_SEED", random.SystemRandom().randrange(1 << 30)))
# what processes of one protocol say to each other: when it changes, PROTOCOL goes up and a line is added
MESSAGES = {
    1: "ce9845dcb4c5bd8a",
    2: "672570a5fb7a3868",
    3: "6c09738d9a881a25",
    4: "6d26ae140b5b0171",
    5: "ca53b003571e6450",
    6: "cf61ce1cbe11b173",
    7: "38d3209b132974ea",
    8: "a07fa75c6455c851",
}

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


def test_messages_that_change_are_another_protocol() -> None:
    """A shadow of before would misread them, or be misread."""
    schema = msgspec.json.schema_components([Request, Answer, ShadowConfig, ShadowCard])[1]
    for described in schema.values():
        described.pop("description", None)  # what we say about them may change
    found = hashlib.sha256(msgspec.json.encode(schema, order="deterministic")).hexdigest()[:16]
    assert MESSAGES.get(PROTOCOL) == found, "messages have changed: raise PROTOCOL"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Answers requests for retirement as a shadow would, from a thread."""
    address, done = f"ipc://{tmp_path}/a.control", threading.Event()
    control = ControlServer(address)

    def serve() -> None:
        while not done.is_set():
            received = control.receive()
            if received is None:
                time.sleep(0.002)
            elif isinstance(received[1], AskRetire):
                control.answer(received[0], Answer())
        control.socket.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield address
    done.set()
    thread.join()


def talk(address: str, *parts: bytes) -> bytes:
    """The answer to a message of these parts, which must come soon."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart(parts)
        assert socket.poll(20_000), f"no answer to {parts!r}"
        return socket.recv()


def test_a_request_of_another_version_is_refused_at_once(server: str) -> None:
    newer = {"type": "yield", "protocol": PROTOCOL + 1, "gently": True}
    older = {"type": "retire"}
    unknown = {"type": "dance", "protocol": PROTOCOL}
    for request in (newer, older, unknown):
        answer = msgspec.msgpack.decode(talk(server, msgspec.msgpack.encode(request)), type=Answer)
        assert answer.refused and answer.protocol == PROTOCOL
        assert request["type"] in answer.error and f"shadow {os.getpid()}" in answer.error
    assert ask(server, AskRetire(), timeout_seconds=20).error == ""


def test_a_refusal_is_an_error_in_words(server: str) -> None:
    class AskMore(AskDefer, frozen=True, tag="more"):
        pass

    began = time.monotonic()
    with pytest.raises(ProtocolMismatch, match=r"does not understand the request 'more'"):
        ask(server, AskMore(1, 2), timeout_seconds=120)  # type: ignore[arg-type]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "answered",
    [b"", b"\xc1", {"protocol": 7, "status": "fine"}, {"handle": {"step": "one"}}],
    ids=["nothing", "nonsense", "newer", "older"],
)
def test_an_answer_that_is_not_understood_is_an_error_in_words(
    tmp_path: Path, answered: bytes | dict[str, object]
) -> None:
    address = f"ipc://{tmp_path}/a.control"
    message = answered if isinstance(answered, bytes) else msgspec.msgpack.encode(answered)
    theirs = answered.get("protocol", 0) if isinstance(answered, dict) else 0
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(address)
        shadow = threading.Thread(target=lambda: (socket.recv(), socket.send(message)))
        shadow.start()
        words = f"it speaks protocol {theirs}, this everystep speaks {PROTOCOL}"
        with pytest.raises(ProtocolMismatch, match=words):
            ask(address, AskRetire(), timeout_seconds=20)
        shadow.join()


def test_fields_of_a_newer_answer_are_passed_over(tmp_path: Path) -> None:
    answer = {**msgspec.to_builtins(Answer(error="no")), "mood": "fine"}
    address = f"ipc://{tmp_path}/a.control"
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(address)
        sent = msgspec.msgpack.encode(answer)
        shadow = threading.Thread(target=lambda: (socket.recv(), socket.send(sent)))
        shadow.start()
        assert ask(address, AskRetire(), timeout_seconds=20).error == "no"
        shadow.join()


def nonsense() -> list[tuple[bytes, ...]]:
    """Single parts and many, empty, nested without end, not text, and drawn bytes."""
    print(f"EVERYSTEP_SEED={SEED}")
    draw = random.Random(SEED)
    words = msgspec.msgpack.encode({"type": "flush", "step": "many", "protocol": PROTOCOL})
    deep = b"\x82\xa8protocol" + bytes([PROTOCOL]) + b"\xa4type" + b"\x91" * 5000 + b"\x01"
    text = b"\x82\xa8protocol" + bytes([PROTOCOL]) + b"\xa4type\xa2\xff\xfe"
    fixed = [(b"",), (b"", b""), (b"a", b"b", b"c"), (words,), (words, words), (deep,), (text,)]
    drawn = [
        tuple(draw.randbytes(draw.randrange(40)) for _ in range(draw.randint(1, 4)))
        for _ in range(30)
    ]
    return [*fixed, *drawn]


def test_nonsense_is_answered_and_changes_nothing(server: str) -> None:
    for parts in nonsense():
        talk(server, *parts)
    assert ask(server, AskRetire(), timeout_seconds=20).error == ""


def test_the_notice_board_outlives_nonsense(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/a.control"
    board = NoticeBoard(address)
    board.post({"step": 3})
    for parts in nonsense():
        talk(board_address(address), *parts)
    assert ask(address, AskStatus(), timeout_seconds=20).status == {"step": 3}
