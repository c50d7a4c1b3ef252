"""Reads facts about this machine, this container and this process."""

from __future__ import annotations

import os
import select
import shutil
from pathlib import Path

from everystep.core.survival import Facts
from everystep.lane.cgroup import read_memory
from everystep.lane.limits import ADDRESS_SPACE, FILE_SIZE, LOCKED, limit_bytes

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # a constant of the Linux kernel
_UNLIMITED_BYTES = 1 << 60


def read_facts() -> Facts:
    cgroup = read_memory()
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Facts(
        pid=os.getpid(),
        parent_pid=os.getppid(),
        pid_namespace_is_initial=_link("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE,
        cgroup=_text("/proc/self/cgroup").strip().replace("\n", " "),
        slurm_step=os.environ.get("SLURM_STEP_ID", ""),
        memory_available_bytes=min(_meminfo("MemAvailable"), cgroup.left_bytes),
        memory_limit_bytes=cgroup.limit_bytes,
        memlock_bytes=limit_bytes(LOCKED),
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
        shm_total_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
        memory_total_bytes=_meminfo("MemTotal"),
        file_limit_bytes=limit_bytes(FILE_SIZE),
        address_limit_bytes=limit_bytes(ADDRESS_SPACE),
        oom_group=cgroup.oom_group,
    )


def disk_free_bytes(path: Path) -> int:
    """Free where this path is, or will be made."""
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    return shutil.disk_usage(folder).free


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks: with the pid it names a process for good.

    0 if it is gone; one that ended but was not waited for, as in containers without an init, is gone.
    """
    fields = _stat_fields(pid)
    return 0 if fields[0] in "ZX" else int(fields[19])


def process_state(pid: int) -> str:
    """The kernel's letter for it: R runs, S sleeps, T is stopped, D waits in the kernel, X is gone."""
    return _stat_fields(pid)[0]


def _stat_fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X"]


def shared_bytes(pid: int) -> int:
    """Shared memory that a process has mapped and touched; 0 if it does not say."""
    for line in _text(f"/proc/{pid}/status").splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


def _meminfo(name: str) -> int:
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED_BYTES


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def is_readable(fd: int, seconds: float = 0.0) -> bool:
    """Whether a descriptor has something to say, waiting that long for it. A process may have more
    descriptors open than select() can count."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(1000 * seconds))
