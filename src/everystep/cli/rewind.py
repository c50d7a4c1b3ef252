"""`everystep rewind`: where the next attach begins. Nothing is copied: a term is claimed that goes on from
that step, and what was written behind it no longer counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli import output
from everystep.cli.runs import RunName, shown
from everystep.cli.status import run_status
from everystep.cli.stop import stop_run
from everystep.core.retention import Rules
from everystep.errors import NotARun, StepUnavailable, UsageError
from everystep.lane.runtime import is_alive
from everystep.process.retire import retire
from everystep.recover.find import find_newest
from everystep.recover.meet import hold_run, shadow_of
from everystep.store import layout
from everystep.store.bucket.tier_view import passed_over
from everystep.store.bucket.tiers import locate, take
from everystep.store.reader import open_run
from everystep.store.runs import Known, claim_term, newest_manifest

_STOP_SECONDS = 600.0


class Take(StrEnum):
    DIRECTORY = "directory"
    BUCKET = "bucket"


def rewind(
    run: RunName,
    step: Annotated[
        int | None,
        typer.Argument(
            metavar="[STEP]",
            help="Go back to this step: that of a base, or of the log behind one. Default: as --take says.",
            show_default=False,
        ),
    ] = None,
    which: Annotated[
        Take | None,
        typer.Option(
            "--take",
            help="Go on from this one where directory and bucket have gone on each on its own; keep the "
            "other beside the directory. Default: go back to STEP.",
        ),
    ] = None,
    bucket: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Name the bucket for --take. Default: RUN."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Discard the later steps without asking.")
    ] = False,
) -> output.Reply:
    """Have the next attach begin at an earlier step; later steps no longer count."""
    if (step is None) == (which is None):
        raise UsageError(
            "rewind: one of STEP and --take is needed", hint="see everystep rewind --help"
        )
    if which is not None:
        return _take(run, which, bucket, yes)
    assert step is not None
    document = rewind_to(open_run(run).path, step, lambda lost: output.confirm(lost, yes))

    def render() -> Iterator[Any]:
        logged = document["replayed_from_the_log"]
        more = f", {logged} of its steps replayed from the log" if logged else ""
        yield output.text((f"step {step}", "bold"), f": the next attach goes on from it{more}")
        yield from document["problems"]

    return output.Reply(document, render)


def _take(run: str, which: Take, bucket: str | None, yes: bool) -> output.Reply:
    """Nobody attaches meanwhile; what a shadow still holds is written to the directory first."""
    path, url = locate(run, bucket)
    if url is None:
        raise UsageError(
            f"rewind {run} --take {which.value}: which bucket?", hint="give it with --bucket URL"
        )
    other = "bucket" if which is Take.DIRECTORY else "directory"
    output.confirm(
        f"go on from the {which.value} of {shown(run)}; what the {other} holds is set aside", yes
    )
    with contextlib.suppress(NotARun):
        stop_run(path, discard=False, timeout=_STOP_SECONDS)
    _, lock = hold_run(path, "rewind")
    try:
        kept = take(path, url, which.value)
    finally:
        lock.close()
    document = {"run": str(path), "took": which.value, "kept": str(kept)}
    return output.Reply(
        document,
        lambda: [
            output.text((which.value, "bold"), ": the next attach goes on from it"),
            output.text(
                f"the {other}'s steps are kept in {kept}: remove it when they are not wanted"
            ),
        ],
    )


def rewind_to(run: Path, step: int, agree: Callable[[str], None]) -> dict[str, Any]:
    """Refused while somebody trains; a shadow that waits for its trainer goes, with what it holds."""
    folder, lock = hold_run(run, "rewind")
    try:
        known = Known(max(layout.term_numbers(run), default=0))
        found, _ = find_newest(run, None, step)
        if found is None:
            raise StepUnavailable(
                f"rewind {run} to step {step}: its base is damaged",
                hint="everystep verify lists the steps that are left",
            )
        newest = _newest_step(run)
        if newest > step:
            agree(f"rewind {run} to step {step}: steps {step + 1} to {newest} will no longer count")
        before = newest_manifest(run)
        rules = before.rules if before else Rules()
        over = passed_over(run, found.point, newest)
        manifest = claim_term(run, found.point, rules, known=known, over=over)
        card = shadow_of(run, folder)
        if card is not None and is_alive(card):  # from here on it cannot write any more
            retire(card)
        again, _ = find_newest(run, None)
        if again is None or again.point.step != step:
            raise StepUnavailable(
                f"rewind {run} to step {step}: what it needs was removed meanwhile",
                hint="everystep ls lists the steps that are left",
            )
        return {
            "run": str(run),
            "step": found.point.step,
            "newest_before": newest,
            "term": manifest.term,
            "replayed_from_the_log": len(found.log),
            "problems": found.problems,
        }
    finally:
        lock.close()


def _newest_step(run: Path) -> int:
    """That the next attach would have begun at: of a shadow that waits, or in the store."""
    status = run_status(run)
    known = (status.get("shadow_step"), status.get("durable_step"))
    return max((step for step in known if step is not None), default=0)
