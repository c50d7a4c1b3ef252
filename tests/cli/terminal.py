"""A command on a terminal of its own, as a person would use it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EVERYSTEP = ("-m", "everystep")


class Terminal:
    """What a command shows, and how to type; it runs in a session whose terminal this is."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self._master = master
        self.process = process
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, words: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while words not in self.shown:
            in_time = time.monotonic() < deadline
            assert in_time and self._read(), f"no {words!r} in …{self.shown[-500:]!r}"

    def finish(self, seconds: float = 60) -> int:
        """Read until it has ended; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, f"it does not end: …{self.shown[-500:]!r}"
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self) -> bool:
        """False once nobody writes any more."""
        if select.select([self._master], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):  # EIO: the other side is closed
                data = os.read(self._master, 65536)
                self.shown += data.decode(errors="replace")
                return bool(data)
            return False
        return True


@contextmanager
def on_terminal(
    *words: object, columns: int = 80, program: tuple[str, ...] = EVERYSTEP, **environment: str
) -> Iterator[Terminal]:
    """`everystep` with these words; killed at the end if it still runs."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    settings: dict[str, Any] = {"stdin": slave, "stdout": slave, "stderr": slave}

    def own_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, words)],
        env={**inherited, "TERM": "xterm", **environment},  # its size is this terminal's
        preexec_fn=own_the_terminal,
        **settings,
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
