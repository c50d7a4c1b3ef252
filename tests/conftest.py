"""Every test gets a meeting place of its own and leaves no shadow, socket or shared memory behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from everystep.lane.arena import SharedMemory
from everystep.store import log_reader

# The same draws every time and none of them timed: a change is judged by what it changes, and a busy machine
# fails nothing. `pytest --hypothesis-profile explore` draws anew.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeat")


def shadows_in(folder: Path) -> list[int]:
    """Shadows whose runtime folder is below `folder`, found by their open sockets' directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            mine = f"EVERYSTEP_RUNTIME_DIR={folder}".encode()
            if b"everystep.shadow" in words and mine in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append(int(entry.name))
    return found


@pytest.fixture
def own_patches() -> Iterator[pytest.MonkeyPatch]:
    """For what is set up here: whatever a test has patched is itself again when this is torn down."""
    with pytest.MonkeyPatch.context() as patches:
        yield patches


@pytest.fixture(autouse=True)
def no_shared_memory_left(own_patches: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test made in its own process is given back: another one counts descriptors."""
    made: list[SharedMemory] = []
    plain = SharedMemory.__init__

    def remembered(self: SharedMemory, fd: int) -> None:
        plain(self, fd)
        made.append(self)

    own_patches.setattr(SharedMemory, "__init__", remembered)
    yield
    for memory in made:
        memory.close()


@pytest.fixture(autouse=True)
def runtime(own_patches: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private runtime directory; shadows still alive at the end are killed."""
    folder = Path(tempfile.mkdtemp(prefix="es-"))  # short: a socket's path has 107 bytes
    own_patches.setenv("EVERYSTEP_RUNTIME_DIR", str(folder))
    yield folder
    for pid in shadows_in(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while shadows_in(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def plain_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the records of a log hold is nobody's business in a test of segments."""
    monkeypatch.setattr(log_reader, "check_body", lambda *_: None)
