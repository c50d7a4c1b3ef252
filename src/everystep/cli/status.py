"""What a run holds right now: asked of its living shadow, or read from the store."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from everystep.cli import output
from everystep.cli.runs import RunName, bucket_of, documents_of
from everystep.core.cadence import age_seconds
from everystep.core.status import Status, build_status, read_status, span
from everystep.errors import EverystepError, NotARun
from everystep.lane.control import AskStatus, ask
from everystep.lane.runtime import runtime_dir
from everystep.recover.claim import claim_of
from everystep.recover.meet import shadow_of
from everystep.store import layout
from everystep.store.disk.files import modified_at
from everystep.store.runs import Lineage, identify, read_lineage

# whatever the trouble, it is to fit a terminal of 80 columns: two rows for a problem, one for the disk
_PROBLEM_LETTERS, _DISK_LETTERS = 125, 58


def status(
    run: RunName,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every field (see docs/STATUS.md).")
    ] = False,
) -> output.Reply:
    """Show what each fault would cost right now, and how the run is."""
    document = run_status(documents_of(run).absolute(), bucket_of(run))
    found = read_status(document)

    def render() -> Iterator[Any]:
        yield output.text((document["summary"], "bold"))
        yield from (output.text((f"{name:<8}", "dim"), words) for name, words in _main_lines(found))
        if verbose:
            yield output.pairs((name, _cell(value)) for name, value in document.items())

    code = output.OK if document.get("health") == "ok" else output.PROBLEM
    return output.Reply(document, render, code)


def run_status(run: Path, bucket: str | None = None) -> dict[str, Any]:
    """The document behind `everystep status`; the same as `run.status()` without the trainer's part."""
    card = shadow_of(run, runtime_dir(str(run)))
    if card is None:
        found = _from_store(run, documents_only=bucket is not None)
        if bucket is None:
            return build_status(str(run), found)
        there = {"url": bucket, "step": found["durable_step"]}  # these are its documents
        return build_status(bucket, found, {"bucket": there})
    try:
        told = ask(card.control, AskStatus(), timeout_seconds=5).status
        if card.run and Path(card.run) != run.resolve():  # it was moved: the shadow cannot see it
            told |= {k: v for k, v in _from_store(run).items() if k.startswith("durable")}
        return build_status(str(run), told)
    except EverystepError as error:
        silent = f"shadow {card.pid} lives but does not answer: {error}"
        trouble = {"pid": card.pid, "health": "degraded", "problem": silent}
        return build_status(str(run), _from_store(run), trouble)


def _from_store(run: Path, *, documents_only: bool = False) -> dict[str, Any]:
    if identify(run)[0] is None:
        raise NotARun(f"status of {run}: there is no run", hint="check the path")
    lineage = read_lineage(run)
    newest = lineage.candidates[0] if lineage.candidates else None
    problems = list(lineage.problems)
    step, written = None, 0.0
    claim = claim_of(run, lineage, problems, documents_only=documents_only)
    if claim is not None:
        step, written = claim.end.step, claim.base.entry.time
        if claim.end != claim.base.point:
            written = _log_time(run, lineage) or written
    return {
        "pid": None,
        "trainer_pid": None,
        "shadow_step": None,
        "durable_step": step,
        "durable_age_seconds": None if step is None else age_seconds(written, time.time()),
        "based_step": claim.base.entry.step if claim else None,
        "term": newest.term if newest else None,
        "exactness": claim.census.exactness if claim else None,
        "health": "degraded" if problems else "ok",
        "problem": "; ".join(problems),
    }


def _log_time(run: Path, lineage: Lineage) -> float:
    """When the log was written last; 0 if that cannot be told."""
    times = [0.0]
    for term, _ in lineage.path:
        for segment in layout.segments(run, term)[-1:]:
            with contextlib.suppress(OSError):
                times.append(modified_at(segment))
    return max(times)


def _main_lines(found: Status) -> Iterator[tuple[str, str]]:
    """What a person needs: tiers, health, rates, processes."""
    yield "run", found.run or ""
    yield from _tiers(found)
    health = found.health or "unknown"
    yield "health", f"{health}: {_begin(found.problem)}" if found.problem else health
    if found.pid is not None:
        yield "rates", ", ".join(_rates(found)) or "nothing was measured yet"
    ahead = found.disk_forecast
    if ahead is not None:
        full = ahead.days_until_full
        until = "" if full is None else f", full in {full:.0f} days"
        yield (
            "disk",
            _begin(ahead.warning, _DISK_LETTERS) or f"{output.size(ahead.free_bytes)} free{until}",
        )
    yield "pids", f"trainer {found.trainer_pid or 'none'}, shadow {found.pid or 'none'}"


def _tiers(found: Status) -> Iterator[tuple[str, str]]:
    newest = max(
        (s for s in (found.shadow_step, found.durable_step) if s is not None), default=None
    )
    if found.shadow_step is not None:
        left = found.shadow_step - (found.replayed_step or 0)
        replay = f", {left} steps of it still to be replayed" if left else ""
        lives = "" if found.outlives_trainer else "; it ends with the trainer's container or job"
        yield "shadow", f"step {found.shadow_step}{replay}{lives}"
    elif found.pid is not None:
        yield "shadow", f"nothing yet: {found.based_atoms} of {found.atoms} tensors have arrived"
    age = found.durable_age_seconds
    old = "" if age is None else f", {span(age)} old"
    yield "store", f"{_place(found.durable_step, newest)}{old}"
    if found.bucket is not None:
        behind = found.bucket.behind_bytes
        unsent = f", {output.size(behind)} to be sent" if behind else ""
        yield "bucket", f"{_place(found.bucket.step, newest)}{unsent}, {found.bucket.url}"


def _begin(words: str, letters: int = _PROBLEM_LETTERS) -> str:
    return words if len(words) <= letters else f"{words[:letters].rstrip()}… (--verbose)"


def _place(step: int | None, newest: int | None) -> str:
    if step is None or newest is None:
        return "nothing yet"
    return f"step {step}, {newest - step} steps behind" if newest > step else f"step {step}"


def _rates(found: Status) -> Iterator[str]:
    measured = found.measured
    if measured is not None and measured.iteration_seconds:
        yield f"{measured.iteration_seconds:.3g} s a step"
    if measured is not None and measured.replay_seconds_per_step:
        yield f"replay {measured.replay_seconds_per_step:.3g} s a step"
    if found.durable_write_bytes_per_second:
        yield f"bases at {output.size(round(found.durable_write_bytes_per_second))}/s"
    if found.durable_bytes_per_day:
        yield f"{output.size(round(found.durable_bytes_per_day))} a day"


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
