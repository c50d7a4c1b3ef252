"""What this machine offers a run: memory, limits, and whether a shadow outlives its trainer."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from everystep.cli import output
from everystep.core.survival import Facts, Survival, survival
from everystep.errors import EverystepError
from everystep.lane.arena import SharedMemory
from everystep.lane.descriptors import passing_refused
from everystep.lane.host import read_facts
from everystep.lane.limits import ADDRESS_SPACE, FILE_SIZE, LOCKED
from everystep.lane.runtime import runtime_dir
from everystep.native import missing
from everystep.process.oom_score import may_lower_oom_score_adj
from everystep.process.watch import ProcessWatch

_PROBE_BYTES = 1 << 20
_MEMLOCK_USEFUL_BYTES = 1 << 30
_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


def doctor() -> output.Reply:
    """Examine this machine: memory, limits, whether a shadow outlives its trainer here."""
    document = examine()

    def render() -> Iterator[Any]:
        for finding in document["findings"]:
            level = finding["level"]
            yield output.text((f"{level:>4}", _COLOURS[level]), f" {finding['what']}")
        yield output.pairs((*document["facts"].items(), *document["versions"].items()))

    return output.Reply(document, render, output.OK if document["ok"] else output.PROBLEM)


Findings = Iterator[tuple[str, str]]  # ok, note or bad, and what it means


def examine() -> dict[str, Any]:
    """Facts and findings; `ok` is false if a run could not work here at all."""
    facts = read_facts()
    verdict = survival(facts)
    found = [*_needed(), *_helpful(), *_replay(), *_oom(facts, verdict), *_limits(facts)]
    return {
        "ok": all(level != "bad" for level, _ in found),
        "outlives_trainer": verdict.outlives,
        "outlives_why": verdict.because,
        "facts": msgspec.to_builtins(facts),
        "findings": [{"level": level, "what": what} for level, what in found],
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("everystep", "torch", "pyzmq", "xxhash")},
        },
    }


def _needed() -> Findings:
    """Without these there is no run."""
    shared = _try(lambda: SharedMemory.create(_PROBE_BYTES, "doctor").close())
    yield ("bad", shared) if shared else ("ok", "shared memory (memfd) can be allocated")
    meeting = _try(lambda: runtime_dir("/"))
    yield ("bad", meeting) if meeting else ("ok", "the runtime directory is private and writable")


def _helpful() -> Findings:
    """What is refused here is done without, in another way."""
    watch = ProcessWatch(os.getpid())
    watch.close()
    yield (
        ("note", watch.refused) if watch.refused else ("ok", "the end of a process is told (pidfd)")
    )
    refused = passing_refused()
    if refused:
        yield (
            "note",
            f"descriptor passing is refused here ({refused}): a restart takes the newest step from "
            "the store, after the shadow has written it",
        )
    else:
        yield "ok", "memory can be handed from process to process (descriptor passing)"


def _replay() -> Findings:
    absent = missing()
    if absent is None:
        yield "ok", "SGD, Adam and AdamW can be replayed by compiled twins"
    else:
        yield (
            "note",
            f"{absent.why}: torch replays every step, more slowly, and bit for bit only on a CPU "
            f"({absent.remedy})",
        )


def _oom(facts: Facts, verdict: Survival) -> Findings:
    yield "ok" if verdict.outlives else "note", f"shadow: {verdict.because}"
    if facts.oom_group or not verdict.outlives:
        return  # said already
    if may_lower_oom_score_adj():
        yield "ok", "when memory runs out the shadow is spared (oom_score_adj)"
    else:
        yield (
            "note",
            "when memory runs out the larger of trainer and shadow is killed: oom_score_adj may not be "
            "lowered here (grant CAP_SYS_RESOURCE, or start the trainer with choom -n 500)",
        )


def _limits(facts: Facts) -> Findings:
    if facts.memory_limit_bytes:
        yield "note", f"cgroup memory limit {_mib(facts.memory_limit_bytes)} counts the shadow too"
    if 0 <= facts.memlock_bytes < _MEMLOCK_USEFUL_BYTES:
        yield (
            "note",
            f"memlock limit {_mib(facts.memlock_bytes)} ({LOCKED.ulimit}): page-locking for a GPU may be "
            "refused, copies are slower then and status says so",
        )
    for limit, found in (
        (FILE_SIZE, facts.file_limit_bytes),
        (ADDRESS_SPACE, facts.address_limit_bytes),
    ):
        if found >= 0:
            yield (
                "note",
                f"{limit.name} is {_mib(found)} ({limit.ulimit}): a larger ring, replica or base is refused",
            )
    if facts.shm_total_bytes < 1 << 30:
        yield "note", f"/dev/shm has {_mib(facts.shm_total_bytes)}; rings use memfd, not it"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


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
