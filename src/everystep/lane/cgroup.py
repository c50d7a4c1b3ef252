"""What the memory cgroup of this process allows, and what happens in it when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED_BYTES = 1 << 60
_ROOT = Path("/sys/fs/cgroup")


class Memory(NamedTuple):
    limit_bytes: int  # the smallest of this cgroup and its parents; 0: none
    left_bytes: int  # before any of those limits is reached
    oom_group: str  # the cgroup that the OOM killer ends as a whole; empty: it picks one process
    oom_kills: int  # in this cgroup so far


def read_memory(root: Path = _ROOT, own: str | None = None) -> Memory:
    """`own` is the text of /proc/self/cgroup."""
    folders = list(_folders(root, _text(Path("/proc/self/cgroup")) if own is None else own))
    limits = [(limit, folder) for folder in folders if (limit := _limit(folder))]
    grouped = [str(f) for f in folders if _text(f / "memory.oom.group").strip() == "1"]
    return Memory(
        min((limit for limit, _ in limits), default=0),
        min((max(0, limit - _used(f)) for limit, f in limits), default=_UNLIMITED_BYTES),
        grouped[-1] if grouped else "",
        next((kills for f in folders if (kills := _oom_kills(f)) is not None), 0),
    )


def _folders(root: Path, own: str) -> Iterator[Path]:
    """This process's memory cgroup and its parents, version 2 and version 1."""
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [root, root / "unified"]
        elif "memory" in controllers.split(","):
            roots = [root / "memory"]
        else:
            continue
        here = Path(path.lstrip("/"))
        yield from (place / part for place in roots for part in (here, *here.parents))


def _limit(folder: Path) -> int:
    limits = [_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return next((n for n in limits if n is not None and n < _UNLIMITED_BYTES), 0)


def _used(folder: Path) -> int:
    """Without what the kernel takes back when memory gets short: files that were read a while ago."""
    for usage, cache in (
        ("memory.current", "inactive_file"),
        ("memory.usage_in_bytes", "total_inactive_file"),
    ):
        used = _number(folder / usage)
        if used is not None:
            return max(0, used - (_field(folder / "memory.stat", cache) or 0))
    return 0


def _oom_kills(folder: Path) -> int | None:
    found = _field(folder / "memory.events", "oom_kill")  # version 2
    return _field(folder / "memory.oom_control", "oom_kill") if found is None else found


def _field(path: Path, name: str) -> int | None:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
