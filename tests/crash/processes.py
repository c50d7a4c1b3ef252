"""What is left of everystep on this machine: shadows, sockets, shared memory."""

from __future__ import annotations

import contextlib
from pathlib import Path


def shadows(runtime: Path) -> list[int]:
    """Shadows of this test, also one that is only just starting."""
    mine = f"EVERYSTEP_RUNTIME_DIR={runtime}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and b"everystep.shadow" in (entry / "cmdline").read_bytes().split(b"\0")
                and mine in (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def sockets(runtime: Path) -> list[Path]:
    return [path for path in runtime.rglob("*") if path.is_socket()]


def memory_of(pids: list[int]) -> list[str]:
    """Shared memory of everystep that these processes hold, by descriptor or by mapping."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(fd.readlink())
                    if "memfd:everystep" in target:
                        found.append(f"{pid} fd {target}")
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found += [f"{pid} {line}" for line in maps if "memfd:everystep" in line]
    return found


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def inodes_of(pid: int) -> set[int]:
    """Inodes of the shared memory a process holds: they tell whether anybody else still has it."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:everystep" in str(fd.readlink()):
                found.add(fd.stat().st_ino)
    return found


def holders_of(inodes: set[int]) -> list[int]:
    """Processes that still hold or map any of this memory."""
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            mapped = {int(line.split()[4]) for line in lines if "memfd:everystep" in line}
            if inodes & (mapped | inodes_of(pid)):
                found.append(pid)
    return found
