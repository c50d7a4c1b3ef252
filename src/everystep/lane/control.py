"""Control messages between trainer, shadow and command line, over ZeroMQ. Tensors never go this way."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from everystep.core.census import Census
from everystep.core.tensors import Stored
from everystep.errors import LaneError, LaneTimeout, ProtocolMismatch, ShadowLost
from everystep.format.base import Point, SessionValues
from everystep.lane.place import check_place, refuse_foreign
from everystep.lane.protocol import NOT_UNDERSTOOD, PROTOCOL, head_of, versions

_LOOK_SECONDS = 1.0  # between two looks whether the shadow still lives
_REQUEST_BYTES_MAX = 1 << 20  # in one part: whoever sends more is cut off
_PARTS_MAX = 16  # of a message; ours have three
_LAST_WORDS_MS = 200  # an answer that a shadow gave before it left is read after it left


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What every request carries."""

    protocol: int = PROTOCOL


class AskStatus(Ask, frozen=True, tag="status"):
    """`exact`: as it is now. Otherwise the shadow's notice board answers, also while the shadow is busy."""

    exact: bool = False


_STATUS = AskStatus.__struct_config__.tag


class AskFlush(Ask, frozen=True, tag="flush"):
    """Make everything up to this step durable; answered when it is, or when it cannot be."""

    step: int


class AskYield(Ask, frozen=True, tag="yield"):
    """Replay what there is, stop changing the replica, and say where everything lies."""


class AskDefer(Ask, frozen=True, tag="defer"):
    """A successor has started: yield to nobody while it lives, it may hold newer steps."""

    pid: int
    start: int


class AskRetire(Ask, frozen=True, tag="retire"):
    """Another shadow holds the state: go away, write nothing."""

    unless_speaking: bool = False  # refused by a shadow that has taken over the run meanwhile


class AskClose(Ask, frozen=True, tag="close"):
    """The trainer ended well: make everything durable and go away."""

    step: int


class AskStop(Ask, frozen=True, tag="stop"):
    """Nobody comes back: make everything durable and go away. Refused while the trainer lives."""


class AskLeave(Ask, frozen=True, tag="leave"):
    """The trainer stops but may come back: the same as if it had died."""


Request = AskStatus | AskFlush | AskYield | AskDefer | AskRetire | AskClose | AskStop | AskLeave


class ReplicaHandle(msgspec.Struct, frozen=True):
    """What a shadow holds, for the trainer that comes back and for the shadow that takes over.

    `extents` memory objects, the holders of `places`, follow through the descriptor socket, then one with the
    log tail if `tail_bytes` is not 0.
    """

    step: int
    # where it lies in the store; before a term was claimed for it: what it came from
    line: Point | None
    census: Census
    places: tuple[Stored, ...]
    extents: int
    session: SessionValues
    tail_bytes: int
    tail_steps: int


class Answer(msgspec.Struct, frozen=True):
    """`error` is empty when the request was carried out."""

    error: str = ""
    # nothing was written: atoms are wrong here, and the trainer has to send them
    repair: bool = False
    status: dict[str, Any] = {}
    handle: ReplicaHandle | None = None
    # the request was not understood: it is of another version, or nonsense
    refused: bool = False
    protocol: int = PROTOCOL


class ControlServer:
    """Owned by the shadow's main thread; requests may be answered later, in any order."""

    def __init__(self, address: str) -> None:
        self.refused = 0  # messages that were not understood
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
        self._address = address
        _bind_for_us(self.socket, address)
        self._decoder = msgspec.msgpack.Decoder(Request)

    def bind_again(self) -> None:
        """Its name was removed: listen under a new one of the same path. Where that fails it may be tried
        again."""
        try:
            _bind_again(self.socket, self._address)
        except zmq.ZMQError as error:
            raise LaneError(f"listen again at {self._address}: {error}") from error

    def fileno(self) -> int:
        """Readable when a request may have come."""
        return int(self.socket.getsockopt(zmq.FD))

    def receive(self) -> tuple[list[bytes], Request] | None:
        """The next request with its return address, or None. What is not understood is refused at once:
        whoever asked would wait."""
        while True:
            try:
                *route, body = _next_message(self.socket)
            except zmq.Again:
                return None
            head, why = head_of(body), ""
            if head.protocol == PROTOCOL:
                try:
                    return route, self._decoder.decode(body)
                except NOT_UNDERSTOOD as error:
                    why = f" ({error})"
            words = (
                f"shadow {os.getpid()} speaks protocol {PROTOCOL} and does not understand the request "
                f"{head.type!r} of protocol {head.protocol}{why}"
            )
            self.refused += 1
            self.answer(route, Answer(error=words, refused=True))

    def answer(self, route: list[bytes], answer: Answer) -> None:
        with contextlib.suppress(zmq.ZMQError):  # whoever asked may be gone
            self.socket.send_multipart([*route, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)

    def close(self) -> None:
        """Answers still on their way go out first (at most LINGER): the process ends by _exit."""
        context = self.socket.context
        self.socket.close()
        context.term()


def _next_message(socket: zmq.Socket[bytes]) -> list[bytes]:
    """zmq.Again if there is none. One in more parts than any of ours becomes an empty request: none of them
    is kept, and its answer does not carry them all as a return address."""
    parts = [socket.recv(zmq.NOBLOCK)]
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        if len(parts) <= _PARTS_MAX:
            parts.append(part)
    return parts if len(parts) <= _PARTS_MAX else [parts[0], b"", b""]


def socket_path(address: str) -> Path:
    """The file of a socket's address."""
    return Path(address.removeprefix("ipc://"))


def _bind_for_us(socket: zmq.Socket[bytes], address: str) -> None:
    """Accept connections of this user's processes alone; the folder is private, too."""
    with contextlib.suppress(zmq.ZMQError):  # a libzmq that was built without it
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    socket.bind(address)


def _bind_again(socket: zmq.Socket[bytes], address: str) -> None:
    with contextlib.suppress(zmq.ZMQError):
        socket.unbind(address)
    socket.bind(address)


def board_address(address: str) -> str:
    """Where the notice board of the shadow with this control address answers."""
    return f"{address.removesuffix('.control')}.board"


class NoticeBoard:
    """Tells the status as it was last put up, from a thread of its own: whoever asks must not wait for a
    pass over the state to end, least of all the trainer."""

    def __init__(self, address: str) -> None:
        self.answer = b""  # replaced by the main thread, sent by the other one
        self.refused = 0  # messages that did not ask for it, which are answered all the same
        # never closed: its thread ends with the process
        self._context: zmq.Context[Any] = zmq.Context()
        # not REP: behind messages without an envelope it loses the answer to a right one
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
        self._address = board_address(address)
        _bind_for_us(self._socket, self._address)

    def post(self, status: dict[str, Any]) -> None:
        first = not self.answer
        self.answer = msgspec.msgpack.encode(Answer(status=status))
        if first:
            threading.Thread(target=self._serve, name="everystep-board", daemon=True).start()

    def _serve(self) -> None:
        """Whatever is asked, and in however many parts: the answer is the same."""
        while True:
            # interrupted, or the folder is being made again, or it has become somebody else's
            with contextlib.suppress(zmq.ZMQError, OSError, LaneError):
                if self._socket.poll(_milliseconds(_LOOK_SECONDS)):
                    peer, *_, body = _next_message(self._socket)
                    self.refused += head_of(body).type != _STATUS
                    self._socket.send_multipart([peer, b"", self.answer], zmq.NOBLOCK)
                elif not socket_path(self._address).exists():
                    check_place(socket_path(self._address).parent)
                    _bind_again(self._socket, self._address)


def ask(
    address: str,
    request: Request,
    *,
    timeout_seconds: float,
    alive: Callable[[], bool] = lambda: True,
    meanwhile: Callable[[], None] = lambda: None,
) -> Answer:
    """One bounded question to a shadow, given up early once `alive` says that it is gone, or `meanwhile`,
    which is called about every second, raises.

    It is asked once, however long the answer takes: a shadow that leaves after its answer would answer
    the first of two equal questions, which nobody waits for any more.
    """
    if isinstance(request, AskStatus) and not request.exact:
        address = board_address(address)
    what = f"ask shadow at {address} for {type(request).__name__[3:].lower()}"
    refuse_foreign(socket_path(address).parent, what)
    deadline = time.monotonic() + timeout_seconds
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    try:
        socket.connect(address)
        socket.send(msgspec.msgpack.encode(request))
        while not socket.poll(_milliseconds(min(_LOOK_SECONDS, deadline - time.monotonic()))):
            if not alive() and not socket.poll(_LAST_WORDS_MS):
                folder = socket_path(address).parent
                raise ShadowLost(
                    f"{what}: it died before it answered", hint=f"see {folder / 'shadow.log'}"
                )
            if time.monotonic() >= deadline:
                raise LaneTimeout(f"{what}: no answer in {timeout_seconds:g} s")
            meanwhile()
        return _understood(socket.recv_multipart()[-1], what)
    finally:
        socket.close()


def _understood(message: bytes, what: str) -> Answer:
    """An answer in words that we know; fields that we do not know are passed over."""
    try:
        answer = msgspec.msgpack.decode(message, type=Answer)
    except NOT_UNDERSTOOD as error:
        theirs = versions("it", head_of(message).protocol)
        raise ProtocolMismatch(
            f"{what}: its answer is not understood ({error}); {theirs}"
        ) from error
    if answer.refused:
        raise ProtocolMismatch(f"{what}: {answer.error}")
    return answer


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(1000 * seconds))
