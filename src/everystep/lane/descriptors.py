"""Passing shared memory from process to process: ZeroMQ carries no descriptors, a Unix socket does."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

from everystep.errors import DescriptorsRefused, LaneError

_FDS_MAX = 250  # one message of the kernel takes 253
_TIMEOUT_SECONDS = 10.0
_SEND_SECONDS = 1.0  # it goes into a buffer
_HERE, _REFUSED = b"d", b"!"  # with descriptors; followed by the reason why there are none


class DescriptorServer:
    """Hands the same descriptors to everybody who connects. Owned by the shadow's main thread."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        self.refused = 0  # connections that got none: of another user, or gone by then
        self.socket = self._bound()

    def bind_again(self) -> None:
        """Its name was removed: listen under a new one of the same path. If that fails all is as before."""
        before, self.socket = self.socket, self._bound()
        before.close()

    def _bound(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind(str(self._path))
            made.listen(4)
            made.setblocking(False)
        except OSError:
            made.close()
            raise
        return made

    def serve(self, fds: list[int]) -> None:
        """Answer everybody who waits now; nobody is waited for, and one that went away is no concern."""
        while True:
            try:
                peer, _ = self.socket.accept()
            except BlockingIOError:
                return
            with peer:
                self.refused += not _handed(peer, fds)

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(OSError):  # the folder may be somebody else's by now
            self._path.unlink(missing_ok=True)


def _handed(peer: socket.socket, fds: list[int]) -> bool:
    try:
        if peer_uid(peer) != os.getuid():
            return False
        peer.settimeout(_SEND_SECONDS)
        for start in range(0, len(fds), _FDS_MAX):
            socket.send_fds(peer, [_HERE], fds[start : start + _FDS_MAX])
    except OSError as error:
        with contextlib.suppress(OSError):
            peer.sendall(_REFUSED + f"sending: {error.strerror or error}".encode())
        return False
    return True


def receive_descriptors(path: str, count: int) -> list[int]:
    """Ask a shadow for its memory; the caller owns what comes back."""
    fds: list[int] = []
    try:
        _receive(path, count, fds)
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise DescriptorsRefused(
            f"descriptor passing is refused here ({error.strerror or error}; "
            f"{len(fds)} of {count} came from {path})"
        ) from error
    return fds


def _receive(path: str, count: int, fds: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_TIMEOUT_SECONDS)
        peer.connect(path)
        if peer_uid(peer) != os.getuid():
            raise LaneError(f"receive descriptors from {path}: another user listens there")
        while len(fds) < count:
            said, more, flags, _ = socket.recv_fds(peer, 1, _FDS_MAX)
            fds += more
            if said == _REFUSED:
                raise OSError(peer.recv(1000).decode(errors="replace"))
            if flags & socket.MSG_CTRUNC:
                raise OSError(
                    "the kernel withholds them: a security policy, or too many open files"
                )
            if not more:
                raise OSError("the shadow sends none")


def passing_refused() -> str:
    """Why descriptors cannot be passed here, tried within this process; empty if they can."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        try:
            socket.send_fds(one, [_HERE], [one.fileno()])
            _, fds, _, _ = socket.recv_fds(other, 1, 1)
        except OSError as error:
            return error.strerror or str(error)
        for fd in fds:
            os.close(fd)
    return "" if fds else "the kernel withholds them"


def peer_uid(peer: socket.socket) -> int:
    """Whose process is at the other end, as the kernel knows it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
