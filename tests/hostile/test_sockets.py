"""Messages that nobody of ours sends, ten thousand on each socket of a living shadow: it serves its trainer
all the same, grows no memory, and leaves when it is asked to."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from torch import nn, optim

import everystep
from everystep.lane.control import AskClose, AskFlush, AskStatus, AskYield, board_address
from everystep.lane.protocol import PROTOCOL
from everystep.lane.runtime import ShadowCard, read_card, runtime_dir

MESSAGES, CONNECTIONS = 10_000, 20
ANSWER_MS = 20_000
OVERSIZED = 2 << 20
GROWTH_BYTES = 64 << 20
CLOSE_SECONDS = 10.0


def noise(chance: random.Random) -> list[bytes]:
    """The parts of a message: nonsense, what is nearly a request, and requests of versions to come."""
    kinds: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: chance.randbytes(chance.randrange(200)),
        lambda: b"\x91" * chance.choice([10, 5000, 100_000]),  # deep
        lambda: b"\xdf\xff\xff\xff\xff" + chance.randbytes(20),  # a map of four billions
        lambda: b"\xc6\xff\xff\xff\xff",  # bytes that do not come
        lambda: msgspec.msgpack.encode({"type": "close", "protocol": PROTOCOL, "step": "ten"}),
        lambda: msgspec.msgpack.encode({"type": "flush", "protocol": PROTOCOL, "step": -1.5}),
        lambda: msgspec.msgpack.encode({"type": "yield", "protocol": PROTOCOL + 1}),
        lambda: msgspec.msgpack.encode({"type": ["close"], "protocol": PROTOCOL}),
        lambda: msgspec.msgpack.encode(
            {"type": "x" * chance.choice([1, 50_000]), "protocol": PROTOCOL}
        ),
        lambda: _cut(chance, chance.choice([AskClose(3), AskFlush(2), AskYield(), AskStatus()])),
    ]
    return [chance.choice(kinds)() for _ in range(chance.choice([1, 1, 1, 2, 5]))]


def _cut(chance: random.Random, request: msgspec.Struct) -> bytes:
    whole = msgspec.msgpack.encode(request)
    return whole[: chance.randrange(len(whole))]


def flood(address: str, chance: random.Random) -> None:
    """Through several connections, each of which ends with a question that gets its answer."""
    with zmq.Context() as context:
        too_much(context, address)
        too_many_parts(context, address, 100_000, 50)
        for _ in range(CONNECTIONS):
            with context.socket(zmq.DEALER) as sender:
                sender.setsockopt(zmq.LINGER, 0)
                sender.setsockopt(zmq.SNDTIMEO, ANSWER_MS)
                sender.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
                sender.connect(address)
                for _ in range(MESSAGES // CONNECTIONS):
                    sender.send_multipart(noise(chance))
                sender.send_multipart([b"", msgspec.msgpack.encode(AskStatus(exact=True))])
                while (
                    "shadow_step"
                    not in msgspec.msgpack.decode(sender.recv_multipart()[-1])["status"]
                ):
                    pass
        shout(address.removeprefix("ipc://"), chance)


def too_much(context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
    """A question that is larger than any of ours, and right: whoever sends it is cut off, unanswered."""
    request = {"type": "status", "protocol": PROTOCOL, "exact": True, "more": bytes(OVERSIZED)}
    with context.socket(zmq.REQ) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(address)
        cut_off = sender.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sender.send(msgspec.msgpack.encode(request))
        poller = zmq.Poller()
        poller.register(sender, zmq.POLLIN)
        poller.register(cut_off, zmq.POLLIN)
        first = dict(poller.poll(ANSWER_MS))
        sender.disable_monitor()
        assert cut_off in first, f"a message of {OVERSIZED} bytes was taken: {first}"


def too_many_parts(
    context: zmq.Context[zmq.Socket[bytes]], address: str, count: int, size: int
) -> None:
    """In one message, none of them too large. What comes back is an answer, and not all of that again."""
    with context.socket(zmq.DEALER) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        sender.connect(address)
        for _ in range(count):
            sender.send(bytes(size), zmq.SNDMORE)
        sender.send(msgspec.msgpack.encode(AskStatus(exact=True)))
        assert [len(part) > 0 for part in sender.recv_multipart()] == [False, True]


def shout(path: str, chance: random.Random) -> None:
    """What is no message at all, to whoever waits for a greeting."""
    for _ in range(200):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(1)
            peer.connect(path)
            peer.send(chance.choice([b"\xff" + bytes(8) + b"\x7f", b"GET / HTTP/1.1\r\n\r\n"]))
            peer.send(chance.randbytes(chance.randrange(1, 2000)))


def knock(path: str, chance: random.Random) -> None:
    """Connections that say something, nothing, or leave at once."""
    for _ in range(MESSAGES):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer,
        ):
            peer.settimeout(0.05)
            peer.connect(path)
            if chance.random() < 0.5:
                peer.send(chance.randbytes(chance.randrange(1, 300)))


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) << 10


@pytest.mark.parametrize("which", ["control", "board", "descriptors"])
def test_noise(which: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("EVERYSTEP_SEED", "17"))
    print(f"EVERYSTEP_SEED={seed}")
    chance = random.Random(f"{which} {seed}")
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    run = everystep.attach(
        model, optimizer, run=tmp_path / "run", on_failure="raise", on_lag="wait"
    )
    steps = run.steps(6)
    _train(model, optimizer, steps, 3)
    card = read_card(runtime_dir(str(tmp_path / "run")))
    assert card is not None
    before = resident(card.pid)
    assert run.status()["messages_refused"] == 0
    idle = _idle(card)
    if which != "descriptors":
        with zmq.Context() as context:
            address = card.control if which == "control" else board_address(card.control)
            too_many_parts(context, address, 150, 1_000_000)
        assert resident(card.pid) < before + GROWTH_BYTES, "it keeps what it has answered"
    if which == "descriptors":
        knock(card.descriptors, chance)
    else:
        flood(card.control if which == "control" else board_address(card.control), chance)
    _train(model, optimizer, steps, 3)
    status = run.status()
    assert status["health"] == "ok", status["problem"]
    assert status["pid"] == card.pid, "the shadow was replaced"
    assert status["messages_refused"] > 0
    assert run.flush(60) == run.step
    assert resident(card.pid) < before + GROWTH_BYTES
    began = time.monotonic()
    run.close()
    assert time.monotonic() - began < CLOSE_SECONDS, "close waited for connections that say nothing"
    for peer in idle:
        peer.close()
    assert everystep.open_run(tmp_path / "run").steps[-1] == run.step


def _train(model: nn.Module, optimizer: optim.Optimizer, steps: Iterator[int], count: int) -> None:
    for _ in range(count):
        next(steps)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _idle(card: ShadowCard) -> list[socket.socket]:
    """Connections that nobody uses, to every socket."""
    peers = []
    for path in (
        card.descriptors,
        card.control.removeprefix("ipc://"),
        board_address(card.control)[6:],
    ):
        for _ in range(20):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peer.settimeout(1)
            with contextlib.suppress(OSError):
                peer.connect(path)
            peers.append(peer)
    return peers
