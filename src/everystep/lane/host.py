"""Reads facts about this machine, this container and this process."""

from __future__ import annotations

import os
import resource
import select
import shutil
from pathlib import Path

from everystep.core.survival import Facts

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # a constant of the Linux kernel
_UNLIMITED_BYTES = 1 << 60


def read_facts() -> Facts:
    limit = _cgroup_memory_limit()
    available = _meminfo_available()
    if limit:
        available = min(available, max(0, limit - _cgroup_memory_used()))
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    return Facts(
        pid=os.getpid(),
        parent_pid=os.getppid(),
        pid_namespace_is_initial=_link("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE,
        cgroup=_text("/proc/self/cgroup").strip().replace("\n", " "),
        slurm_step=os.environ.get("SLURM_STEP_ID", ""),
        memory_available_bytes=available,
        memory_limit_bytes=limit,
        memlock_bytes=-1 if memlock == resource.RLIM_INFINITY else memlock,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
        shm_total_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
    )


def disk_free_bytes(path: Path) -> int:
    """Free where this path is, or will be made."""
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    return shutil.disk_usage(folder).free


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks: with the pid it names a process for good.

    0 if it is gone; one that ended but was not waited for, as in containers without an init, is gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def shared_bytes(pid: int) -> int:
    """Shared memory that a process has mapped and touched; 0 if it does not say."""
    for line in _text(f"/proc/{pid}/status").splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


def _meminfo_available() -> int:
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED_BYTES


def _cgroup_folders() -> list[Path]:
    """The folders of this process's memory cgroup and its parents, version 2 and version 1."""
    folders: list[Path] = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        elif "memory" in controllers.split(","):
            roots = [Path("/sys/fs/cgroup/memory")]
        else:
            continue
        here = Path(path.lstrip("/"))
        folders += [root / part for root in roots for part in (here, *here.parents)]
    return folders


def _cgroup_memory_limit() -> int:
    limits = [
        int(text)
        for folder in _cgroup_folders()
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(str(folder / name)).strip()).isdigit()
    ]
    smallest = min(limits, default=_UNLIMITED_BYTES)
    return smallest if smallest < _UNLIMITED_BYTES else 0


def _cgroup_memory_used() -> int:
    for folder in _cgroup_folders():
        for name in ("memory.current", "memory.usage_in_bytes"):
            text = _text(str(folder / name)).strip()
            if text.isdigit():
                return int(text)
    return 0


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
