"""What this machine offers a run: memory, limits, and whether a shadow outlives its trainer."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from everystep.core.survival import survival
from everystep.errors import EverystepError
from everystep.lane.arena import SharedMemory
from everystep.lane.host import read_facts
from everystep.lane.runtime import runtime_dir

_PROBE_BYTES = 1 << 20
_MEMLOCK_USEFUL_BYTES = 1 << 30


def examine() -> dict[str, Any]:
    """Facts and findings; `ok` is false if a run could not work here at all."""
    facts = read_facts()
    verdict = survival(facts)
    findings: list[dict[str, str]] = []

    def find(level: str, what: str) -> None:
        findings.append({"level": level, "what": what})

    shared = _try(lambda: SharedMemory.create(_PROBE_BYTES, "doctor").close())
    find("ok" if not shared else "bad", shared or "shared memory (memfd) can be allocated")
    meeting = _try(lambda: runtime_dir("/"))
    find("ok" if not meeting else "bad", meeting or "the runtime directory is private and writable")
    find("ok" if verdict.outlives else "note", f"shadow: {verdict.because}")
    if facts.memory_limit_bytes:
        find(
            "note",
            f"cgroup memory limit {facts.memory_limit_bytes / 2**20:.0f} MiB counts the shadow too",
        )
    if 0 <= facts.memlock_bytes < _MEMLOCK_USEFUL_BYTES:
        find(
            "note",
            f"memlock limit {facts.memlock_bytes / 2**20:.0f} MiB: GPU drivers may need more",
        )
    if facts.shm_total_bytes < 1 << 30:
        find(
            "note", f"/dev/shm has {facts.shm_total_bytes / 2**20:.0f} MiB; rings use memfd, not it"
        )
    return {
        "ok": all(f["level"] != "bad" for f in findings),
        "outlives_trainer": verdict.outlives,
        "outlives_why": verdict.because,
        "facts": msgspec.to_builtins(facts),
        "findings": findings,
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("everystep", "torch", "pyzmq", "xxhash")},
        },
    }


def _try(work: Any) -> str:
    try:
        work()
    except (OSError, EverystepError) as error:
        return str(error)
    return ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
