"""Passing shared memory from process to process: ZeroMQ carries no descriptors, a Unix socket does."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from everystep.errors import LaneTimeout

_FDS_MAX = 250  # one message of the kernel takes 253
_TIMEOUT_SECONDS = 10.0


class DescriptorServer:
    """Hands the same descriptors to everybody who connects. Owned by the shadow's main thread."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(path))
        self.socket.listen(4)
        self.socket.setblocking(False)

    def serve(self, fds: list[int]) -> None:
        """Answer everybody who waits now; a peer that went away again is no concern of ours."""
        while True:
            try:
                peer, _ = self.socket.accept()
            except BlockingIOError:
                return
            with peer, contextlib.suppress(OSError):
                peer.settimeout(_TIMEOUT_SECONDS)
                for start in range(0, len(fds), _FDS_MAX):
                    socket.send_fds(peer, [b"d"], fds[start : start + _FDS_MAX])
                    peer.recv(1)

    def close(self) -> None:
        self.socket.close()
        self._path.unlink(missing_ok=True)


def receive_descriptors(path: str, count: int) -> list[int]:
    """Ask a shadow for its memory; the caller owns what comes back."""
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_TIMEOUT_SECONDS)
        try:
            peer.connect(path)
            while len(fds) < count:
                _, more, _, _ = socket.recv_fds(peer, 1, _FDS_MAX)
                if not more:
                    break
                fds += more
                peer.send(b"k")
        except OSError as error:
            _close(fds)
            raise LaneTimeout(f"receive {count} descriptors from {path}: {error}") from error
    if len(fds) != count:
        _close(fds)
        raise LaneTimeout(f"receive descriptors from {path}: {len(fds)} came, expected {count}")
    return fds


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
