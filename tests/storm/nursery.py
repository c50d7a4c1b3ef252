"""A process that has torch and everystep imported and forks lives, and the shadows they ask for: neither then
costs an import of torch.

A shadow forked here runs the same code as one that is started as a program; `--cold` starts them as programs.
The nursery never runs a kernel, so no thread of torch exists when it forks. It adopts and reaps orphans, as
init does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

_START_SECONDS = 120.0
_BYTES_MAX = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36
HERE = Path(__file__).resolve().parent


class Nursery:
    """The runner's side. May be used from several threads."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="st-")
        self.address = f"{self._home.name}/nursery"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{HERE.name}.nursery", self.address],
            cwd=HERE.parent,
            env=environment,
            stdin=subprocess.PIPE,  # it ends when we do
        )
        deadline = time.monotonic() + _START_SECONDS
        while not Path(self.address).exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the nursery did not start ({self._process.poll()})")
            time.sleep(0.02)

    def live(self, order: dict[str, Any], seconds: float) -> int | None:
        """Run one life to its end; how it ended, as subprocess does. None: it was killed after `seconds`."""
        with connection(self.address) as channel:
            channel.send(json.dumps({"kind": "life", "nursery": self.address, **order}).encode())
            pid = json.loads(channel.recv(_BYTES_MAX))["pid"]
            channel.settimeout(seconds)
            try:
                return int(json.loads(channel.recv(_BYTES_MAX))["exit"])
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                return None

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._home.cleanup()


def connection(address: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(address)
    return channel


class WarmPopen:
    """Stands in for `subprocess.Popen` where a shadow is started: asks the nursery for it."""

    def __init__(self, words: list[str], **given: Any) -> None:
        read_end, write_end = os.pipe()
        self.stdin = os.fdopen(write_end, "wb")
        log = given["stdout"].fileno()
        order = {"kind": "shadow", "env": given["env"], "fds": [0, 2, *given["pass_fds"]]}
        self._channel = connection(os.environ["STORM_NURSERY"])
        fds = [read_end, log, *given["pass_fds"]]
        socket.send_fds(self._channel, [json.dumps(order).encode()], fds)
        os.close(read_end)

    def wait(self, timeout: float | None = None) -> int:
        """Until the process that was asked for has left the shadow behind."""
        while self._channel.recv(_BYTES_MAX):
            pass
        self._channel.close()
        return 0

    def kill(self) -> None:
        """It gives up by itself when its pipe is closed."""


class _Server:
    def __init__(self, address: str) -> None:
        self._lives: dict[int, socket.socket] = {}
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{address}-soon")
        self._listener.listen(64)
        Path(f"{address}-soon").rename(address)  # who sees it may connect

    def serve(self) -> None:
        """Until the runner's end of our stdin is closed."""
        selector = selectors.DefaultSelector()
        for source in (sys.stdin.fileno(), self._wake, self._listener):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == sys.stdin.fileno():
                    return
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    self._reap()
                else:
                    self._answer(self._listener.accept()[0])

    def _answer(self, channel: socket.socket) -> None:
        data, fds, _, _ = socket.recv_fds(channel, _BYTES_MAX, 64)
        if not data:  # who asked was killed before it could say what for
            channel.close()
            return
        order = json.loads(data)
        pid = os.fork()
        if pid == 0:
            self._become(order, channel, fds)
        for fd in fds:
            os.close(fd)
        if order["kind"] == "shadow":
            channel.close()
            return
        self._lives[pid] = channel
        channel.send(json.dumps({"pid": pid}).encode())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                channel = self._lives.pop(pid, None)
                if channel is not None:
                    code = os.waitstatus_to_exitcode(status)
                    with contextlib.suppress(OSError):
                        channel.send(json.dumps({"exit": code}).encode())
                    channel.close()

    def _become(self, order: dict[str, Any], channel: socket.socket, fds: list[int]) -> None:
        """In the child: never returns."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._listener, self._wake, self._waker, *self._lives.values()):
            other.close()
        try:
            if order["kind"] == "life":
                from storm.child import live

                channel.close()
                live(order)
            else:
                _be_shadow(order, channel, fds)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)


def _be_shadow(order: dict[str, Any], channel: socket.socket, fds: list[int]) -> None:
    """What `python -m everystep.shadow` does, without starting python."""
    os.setsid()
    os.chdir("/")
    import fcntl

    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 300) for fd in fds]
    keep = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD, 400)
    for fd in (*fds, channel.detach()):
        os.close(fd)
    for source, target in zip(high, order["fds"], strict=True):
        os.dup2(source, target)
        os.close(source)
    os.dup2(2, 1)
    os.environ.clear()
    os.environ.update(order["env"])
    sys.stdin = os.fdopen(0)
    plain = os.fork

    def fork() -> int:
        pid = plain()
        if pid == 0:
            os.close(keep)  # who waits for our parent waits no longer
            (Path(order["env"]["STORM_PIDS"]) / str(os.getpid())).touch()
        return pid

    os.fork = fork  # type: ignore[assignment]
    os.nice = lambda _: 0  # type: ignore[assignment] # on a busy machine lives would wait for it
    for folder in order["env"].get("PYTHONPATH", "").split(os.pathsep):
        custom = Path(folder) / "sitecustomize.py"
        if custom.is_file():
            exec(custom.read_text(), {"__file__": str(custom)})
            break
    import everystep.shadow.__main__  # noqa: F401 - importing it runs it


def main() -> None:
    import torch._dynamo  # which the first optimizer would import
    import torch.optim.lr_scheduler
    import torch.optim.swa_utils

    import storm.child  # noqa: F401 - imported here once, not in every life

    torch.set_num_threads(1)
    gc.freeze()  # what is here already is not looked at, and so not copied, in every child
    _Server(sys.argv[1]).serve()
    os._exit(0)  # tearing torch down takes long


if __name__ == "__main__":
    main()
