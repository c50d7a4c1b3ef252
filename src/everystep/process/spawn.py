"""Starting a shadow from the trainer: a new program in a session of its own, no CUDA, no fork."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from everystep.errors import EverystepError, Fenced, ShadowLost
from everystep.lane.control import Answer, Request, ask
from everystep.lane.host import is_readable
from everystep.lane.place import remake
from everystep.process.config import ShadowConfig
from everystep.process.watch import ProcessWatch

_START_SECONDS = 60.0
_LOG_BYTES_MAX = 1 << 20
_SAID_BYTES_MAX = 4096


class ShadowHandle:
    """A running shadow, as its trainer sees it."""

    def __init__(self, pid: int, control: str) -> None:
        self.pid = pid
        self.control = control
        self.watch = ProcessWatch(pid)
        if self.watch.gone:
            self.watch.close()
            raise ShadowLost(f"shadow {pid}: died right after its start")

    @property
    def alive(self) -> bool:
        return not self.watch.gone

    def wait_gone(self, seconds: float) -> bool:
        return self.watch.wait_gone(seconds)

    def ask(
        self,
        request: Request,
        *,
        timeout_seconds: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Ask, noticing within a second if it dies meanwhile."""
        return ask(
            self.control,
            request,
            timeout_seconds=timeout_seconds,
            alive=lambda: self.alive,
            meanwhile=meanwhile,
        )

    def close(self) -> None:
        self.watch.close()


def start_shadow(**fields: Any) -> ShadowHandle:
    """Start a shadow and return once it holds the ring: from then on records outlive the trainer. Fenced: the
    run has been claimed by somebody else.

    `fields` are those of ShadowConfig, without `ready_fd`.
    """
    read_end, write_end = os.pipe()
    config = ShadowConfig(ready_fd=write_end, **fields)
    fds = [config.ring_fd, write_end, *config.extent_fds]
    fds += [config.tail_fd] if config.tail_fd >= 0 else []
    log_path = Path(config.folder) / "shadow.log"
    try:
        remake(log_path.parent)
        with _open_log(log_path) as log:
            said_before = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "everystep.shadow"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                start_new_session=True,
                cwd="/",
                env=_environment(),
            )
        os.close(write_end)
        write_end = -1
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(msgspec.msgpack.encode(config))
        try:
            pid = _read_pid(read_end, log_path, said_before)
        except EverystepError:
            process.kill()
            raise
        finally:
            process.wait()  # it has forked the shadow and ended, or was just killed
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
    return ShadowHandle(pid, f"ipc://{config.folder}/{config.name}.control")


def _read_pid(fd: int, log_path: Path, said_before: int) -> int:
    data = os.read(fd, _SAID_BYTES_MAX) if is_readable(fd, _START_SECONDS) else b""
    if not data:
        said = log_path.read_bytes()[said_before:].decode(errors="replace")
        lines = said.strip().splitlines()[-3:]
        found = "; ".join(lines) or "nothing in its log"
        raise ShadowLost(f"start shadow: it did not come up: {found}", hint=f"see {log_path}")
    if not data.isdigit():
        raise Fenced(data.decode(errors="replace"))
    return int(data)


def _open_log(path: Path) -> Any:
    if path.exists() and path.stat().st_size > _LOG_BYTES_MAX:
        path.unlink()
    return path.open("ab")


def _environment() -> dict[str, str]:
    drop = {"TORCHELASTIC_USE_AGENT_STORE"}
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_WAIT_POLICY"] = "passive"  # between two passes nobody spins on a core
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(p).absolute()) for p in sys.path)
    return environment
