"""`everystep prune`: what the rules keep, what they do not, and the bytes between them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from everystep.cli import output
from everystep.cli.runs import RunName
from everystep.core.retention import Rules
from everystep.errors import RunBusy
from everystep.format.base import Manifest
from everystep.lane.host import process_start
from everystep.lane.runtime import runtime_dir
from everystep.options import Keep
from everystep.recover.meet import hold_run, shadow_of
from everystep.store import layout
from everystep.store.disk.files import RunPath, bytes_of
from everystep.store.log import old_segments
from everystep.store.reader import open_run
from everystep.store.retention import (
    Plan,
    frontier,
    newest_verified,
    plan_retention,
    unreferenced,
)
from everystep.store.runs import Known, Lineage, newest_manifest, read_lineage
from everystep.store.term import TermWriter


def _keep(what: str) -> Any:
    return typer.Option(help=f"{what} Default: as at the last attach.", show_default=False)


def prune(
    run: RunName,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would go, and remove nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Prune although another host wrote the run, and may still write it."
        ),
    ] = False,
    keep_last: Annotated[int | None, _keep("Keep this many of the last bases.")] = None,
    keep_every: Annotated[
        int | None, _keep("Keep the first base in every N steps; 0 for none.")
    ] = None,
    keep_hourly: Annotated[
        int | None, _keep("Keep the first base of an hour, for this many hours.")
    ] = None,
    keep_daily: Annotated[
        int | None, _keep("Keep the first base of a day, for this many days.")
    ] = None,
    keep_best: Annotated[
        str | None, _keep("Keep the best by what run.report told, as '3 lowest' or '3 highest'.")
    ] = None,
    keep_slots: Annotated[
        int | None,
        _keep("Keep optimizer slots with this many of the last bases; 0 for all bases."),
    ] = None,
) -> output.Reply:
    """Remove the bases that no rule keeps."""
    given = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_hourly": keep_hourly,
        "keep_daily": keep_daily,
        "keep_best": keep_best,
        "keep_slots": keep_slots,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    document = prune_run(open_run(run).path, changes, dry_run=dry_run, force=force)
    code = output.PROBLEM if document["problems"] else output.OK
    return output.Reply(document, lambda: _render(document), code)


def prune_run(run: Path, changes: dict[str, Any], *, dry_run: bool, force: bool) -> dict[str, Any]:
    known = Known(max(layout.term_numbers(run), default=0))
    lineage = read_lineage(run)  # before anything else: it may not be a run at all
    newest = newest_manifest(run)
    rules = msgspec.structs.replace(newest.rules if newest else Rules(), **changes)
    Keep(**{name.removeprefix("keep_"): value for name, value in changes.items()})  # checks them
    with contextlib.ExitStack() as held:
        if not dry_run:
            _refuse_while_written(run, newest, force)
            _, lock = hold_run(run, "prune")  # nobody attaches meanwhile
            held.callback(lock.close)
            lineage = read_lineage(run)
        verified = newest_verified(run, lineage)
        plan = plan_retention(run, lineage, rules, verified)
        document = _describe(run, lineage, plan, rules, verified)
        if not dry_run and verified is not None and document["frees_bytes"]:
            point = frontier(run, lineage, verified)
            kept = newest.rules if newest else rules
            TermWriter(run, point, kept, known=known).carry_out(plan)
    return {**document, "done": not dry_run}


def _refuse_while_written(run: Path, newest: Manifest | None, force: bool) -> None:
    """A new term would fence a living shadow: it could not write what it holds any more."""
    card = shadow_of(run, runtime_dir(str(run)))
    pid = card.pid if card else newest.pid if newest and _runs_shadow(newest) else None
    if pid is not None:
        raise RunBusy(
            f"prune {run}: shadow {pid} on this host writes it",
            hint="--dry-run shows what would go; give attach other rules with keep=Keep(…), or stop it first",
        )
    if newest and newest.host != socket.gethostname() and not force:
        raise RunBusy(
            f"prune {run}: pid {newest.pid} on host {newest.host} wrote it last, and may still live",
            hint=f"prune on {newest.host}, or add --force once nothing trains there any more",
        )


def _runs_shadow(manifest: Manifest) -> bool:
    """The pid may be that of a shadow that meets its trainer elsewhere, or belong to anything by now."""
    if manifest.host != socket.gethostname() or not process_start(manifest.pid):
        return False
    with contextlib.suppress(OSError):
        return b"everystep.shadow" in Path(f"/proc/{manifest.pid}/cmdline").read_bytes()
    return False


def _describe(
    run: Path, lineage: Lineage, plan: Plan, rules: Rules, verified: int | None
) -> dict[str, Any]:
    freed: dict[RunPath, int] = {}
    term = lineage.path[-1][0] if lineage.path else 0
    for path in unreferenced(run, plan.keep, term) if verified is not None else ():
        base = layout.folders_of(path)[-1]
        freed[base] = freed.get(base, 0) + bytes_of(path)
    log = old_segments(run, lineage, plan.log_begins_at) if verified is not None else []
    bases: list[dict[str, Any]] = [
        {
            "step": c.entry.step,
            "term": c.term,
            "time": c.entry.time,
            "metric": c.entry.metric,
            "stays": verdict.stays,
            "why": list(verdict.reasons),
            "loses_slots": verdict.stays and not verdict.with_slots and not c.weights_only,
            "frees_bytes": freed.pop(layout.base_dir(run, c.term, c.entry.step), 0),
        }
        for c, verdict in plan.bases
    ]
    log_bytes = sum(map(bytes_of, log))
    leftovers = sum(freed.values())
    unverified = verified is None and bool(bases)
    return {
        "run": str(run),
        "rules": msgspec.structs.asdict(rules),
        "verified_step": None if verified is None else lineage.candidates[verified].entry.step,
        "bases": bases,
        "log_frees_bytes": log_bytes,
        "leftovers_free_bytes": leftovers,
        "frees_bytes": log_bytes + leftovers + sum(b["frees_bytes"] for b in bases),
        "problems": [*lineage.problems, *["no base is valid: nothing goes"] * unverified],
    }


def _render(document: dict[str, Any]) -> Iterator[Any]:
    yield document["run"]
    yield output.columns(
        ("step", "term", "written", "metric", "", "why", "frees"),
        (
            (
                b["step"],
                b["term"],
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(b["time"])),
                "" if b["metric"] is None else f"{b['metric']:g}",
                ("weights stay" if b["loses_slots"] else "stays") if b["stays"] else "goes",
                ", ".join(b["why"]) or "no rule keeps it",
                output.size(b["frees_bytes"]) if b["frees_bytes"] else "",
            )
            for b in document["bases"]
        ),
    )
    yield from (output.text(("problem:", "red"), f" {p}") for p in document["problems"])
    for name in ("log", "leftovers"):
        count = document["log_frees_bytes" if name == "log" else "leftovers_free_bytes"]
        if count:
            yield f"{name}: {output.size(count)}"
    word = "freed" if document["done"] else "would be freed"
    yield f"{output.size(document['frees_bytes'])} {word}"
