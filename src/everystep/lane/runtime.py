"""Where the processes of a run on this host meet: one private directory, found from the run's path."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import msgspec

from everystep.errors import LaneError, RunBusy
from everystep.lane.host import process_start

_FOLDER_BYTES_MAX = 85  # a socket's path has 107 bytes, and names go behind the folder


class ShadowCard(msgspec.Struct, frozen=True):
    """How to find a shadow; written by it once it listens."""

    pid: int
    start: int
    control: str = ""
    descriptors: str = ""
    protocol: int = 0  # of its messages; see lane/protocol.py


def runtime_dir(run: str) -> Path:
    """The run's meeting place, made if missing, readable by this user alone."""
    root = os.environ.get("EVERYSTEP_RUNTIME_DIR")
    base = Path(root) if root else Path(tempfile.gettempdir()) / f"everystep-{os.getuid()}"
    name = hashlib.sha256(str(Path(run).absolute()).encode()).hexdigest()[:16]
    for folder in (base, base / name):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise LaneError(
                f"runtime directory {folder}: owned by another user",
                hint="set EVERYSTEP_RUNTIME_DIR to a private directory",
            )
    if len(os.fsencode(base / name)) > _FOLDER_BYTES_MAX:
        raise LaneError(
            f"runtime directory {base / name}: too long for the path of a socket",
            hint="set EVERYSTEP_RUNTIME_DIR to a short path",
        )
    return base / name


def is_alive(card: ShadowCard) -> bool:
    return process_start(card.pid) == card.start


def read_card(folder: Path) -> ShadowCard | None:
    """The card of the run's shadow, if there is a living one. One that went after its card was read may have
    left the run to a successor, whose card is there by then."""
    card = _stored_card(folder)
    while card is not None and not is_alive(card):
        before, card = card, _stored_card(folder)
        if card == before:
            return None
    return card


def _stored_card(folder: Path) -> ShadowCard | None:
    try:
        return msgspec.json.decode((folder / "shadow.json").read_bytes(), type=ShadowCard)
    except (OSError, ValueError):
        return None


def write_card(folder: Path, card: ShadowCard) -> None:
    temporary = folder / f"shadow.json.{card.pid}"
    temporary.write_bytes(msgspec.json.encode(card))
    temporary.replace(folder / "shadow.json")


def remove_card(folder: Path, pid: int) -> None:
    """Take the card away if it is still ours."""
    card = read_card(folder)
    if card is not None and card.pid == pid:
        (folder / "shadow.json").unlink(missing_ok=True)


class TrainerLock:
    """One trainer per run on this host. A POSIX lock: it dies with the process, and forked data
    loader workers do not inherit it."""

    _held_here: ClassVar[set[Path]] = set()  # a POSIX lock does not exclude its own process

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        if folder in self._held_here:
            raise RunBusy(
                f"attach {run}: this process has attached the run already",
                hint="close that Run first, or give this one another run=",
            )
        self._fd = os.open(folder / "trainer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = (
                os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "another process"
            )
            os.close(self._fd)
            raise RunBusy(
                f"attach {run}: the run is held by {holder}",
                hint="stop that trainer first, or give this one another run=",
            ) from error
        self._held_here.add(folder)
        text = f"pid {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._held_here.discard(self._folder)
