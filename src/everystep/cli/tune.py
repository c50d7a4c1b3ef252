"""`everystep tune`: what was measured, what is best, why, and what else would cost."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from everystep.cli import output
from everystep.cli.runs import RunName, bucket_of, documents_of, shown
from everystep.cli.status import run_status
from everystep.core.failures import Mtbf, mean_time_between_failures
from everystep.errors import StoreError, UsageError
from everystep.option_values import duration_seconds
from everystep.store.bucket.client import is_url
from everystep.store.bucket.tiers import local_dir
from everystep.store.disk.probe import Disk, measure_disk
from everystep.store.history import lives_of
from everystep.store.reader import open_run
from everystep.tune.choose import Choice, choose
from everystep.tune.measured import Measured, machine_of
from everystep.tune.model import Machine, Waste

_REPLAY_BYTES_PER_SECOND = 10e9  # of state that is read and written, where nothing was measured


def tune(
    run: RunName,
    mtbf: Annotated[
        str | None,
        typer.Option(
            help="Plan for this mean time between failures, as 6h. Default: from the run's history."
        ),
    ] = None,
    plot: output.Plot = None,
    budget: Annotated[
        float, typer.Option(help="Let the plan slow training down by this many percent.")
    ] = 0.5,
    step_time: Annotated[
        str | None,
        typer.Option(
            help="Take this for the time of a step, as 0.2s. Default: measured by a living shadow."
        ),
    ] = None,
    replay_time: Annotated[
        str | None,
        typer.Option(
            help="Take this for the time to replay a step, as 0.01s. Default: measured, or assumed."
        ),
    ] = None,
    record_bytes: Annotated[
        int | None,
        typer.Option(
            help="Take this many bytes for a step in the log. Default: measured, or assumed."
        ),
    ] = None,
    restart: Annotated[
        str, typer.Option(help="Take this for the time from a failure to the next attach.")
    ] = "60s",
) -> output.Reply:
    """Choose how often to write bases and the log, by what was measured, and say why."""
    output.check_writable(plot)
    given = _given(step_time, replay_time, record_bytes)
    path = documents_of(run).absolute()
    status = run_status(path, bucket_of(run))
    disk = _measure_disk(run)
    facts = _facts(path, status, given, disk)
    failures = _failures(path, mtbf, lives=facts.living)
    machine = machine_of(
        facts.measured,
        sync_seconds=disk.sync_seconds,
        write_bytes_per_second=disk.write_bytes_per_second,
        mtbf_seconds=failures.seconds,
        restart_seconds=duration_seconds("restart", restart),
    )
    choice = choose(machine, budget)
    if plot is not None:
        from everystep.bench.plot import plot_waste

        output.draw(plot, lambda file: plot_waste(machine, choice.plan, budget, file))
    document = _document(shown(run), machine, choice, failures, facts, budget)
    return output.Reply(document, lambda: _render(document))


def _measure_disk(run: str) -> Disk:
    """Of the directory that training writes to; a bucket's may not be here yet."""
    place = local_dir(run) if is_url(run) else Path(run).absolute()
    while not place.exists():
        place = place.parent
    try:
        return measure_disk(place)
    except OSError as error:
        raise StoreError(
            f"tune {shown(run)}: the disk of {place} cannot be measured: {error.strerror}",
            hint="tune where training may write",
        ) from error


class _Facts(NamedTuple):
    measured: Measured
    sources: dict[str, str]  # of what was not measured by a living shadow
    living: bool
    in_force: dict[str, Any] | None


def _given(
    step_time: str | None, replay_time: str | None, record_bytes: int | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if step_time is not None:
        found["iteration_seconds"] = duration_seconds("step-time", step_time)
    if replay_time is not None:
        found["replay_seconds_per_step"] = duration_seconds("replay-time", replay_time)
    if record_bytes is not None:
        found["record_bytes"] = record_bytes
    return found


def _facts(path: Path, status: dict[str, Any], given: dict[str, Any], disk: Disk) -> _Facts:
    """What the living shadow measured, or what the store shows; what was given wins."""
    sources = dict.fromkeys(given, "given")
    living = bool(status.get("measured"))
    measured = Measured(**status["measured"]) if living else Measured()
    measured = dataclasses.replace(measured, **given)
    if not measured.enough:
        assumed = _from_store(path, measured, disk)
        sources |= dict.fromkeys(assumed, "assumed")
        measured = dataclasses.replace(measured, **assumed)
    if not measured.iteration_seconds:
        raise UsageError(
            f"tune {path}: nobody has measured how long a step takes",
            hint="ask again after some steps of a living run, or give --step-time 0.2s",
        )
    return _Facts(measured, sources, living, status.get("tuner"))


def _from_store(path: Path, measured: Measured, disk: Disk) -> dict[str, Any]:
    """Sizes from the newest base; rates as they usually are."""
    bases = open_run(path).bases
    if not bases:
        raise UsageError(f"tune {path}: there is no base yet", hint="ask again after some steps")
    size = bases[0].entry.total_bytes
    cores = len(os.sched_getaffinity(0))
    usual = {
        "base_bytes": size,
        "base_write_seconds": size / disk.write_bytes_per_second,
        "record_bytes": size / 3,  # Adam: a gradient beside the weight and two slots
        "replay_seconds_per_step": size / _REPLAY_BYTES_PER_SECOND,
    }
    unknown = {name: value for name, value in usual.items() if not getattr(measured, name)}
    return {**unknown, "base_slowdown": 1 / cores, "log_slowdown": 1 / cores, "cores": cores}


def _failures(path: Path, given: str | None, *, lives: bool) -> Mtbf:
    if given is not None:
        return Mtbf(duration_seconds("mtbf", given), "given")
    return mean_time_between_failures(lives_of(path, newest_lives=lives))


def _document(
    run: str, machine: Machine, choice: Choice, failures: Mtbf, facts: _Facts, budget: float
) -> dict[str, Any]:
    return {
        "run": run,
        "budget_percent": budget,
        "mtbf_why": failures.why,
        "machine": dataclasses.asdict(machine),
        "sources": facts.sources,
        "in_force": facts.in_force,
        "plan": dataclasses.asdict(choice.plan),
        "predicted": _costs(choice.waste),
        "why": list(choice.why),
        "others": [
            {
                "what": other.what,
                "plan": dataclasses.asdict(other.plan),
                "predicted": _costs(other.waste),
                "objections": list(other.objections),
            }
            for other in choice.others
        ],
    }


def _costs(waste: Waste) -> dict[str, float]:
    return {
        **dataclasses.asdict(waste),
        "total": waste.total,
        "overhead_percent": waste.overhead_percent,
    }


def _render(document: dict[str, Any]) -> Iterator[Any]:
    plan, predicted = document["plan"], document["predicted"]
    log = f"durable_log={plan['batch']}" if plan["batch"] else "no log"
    wasted = predicted["total"] - predicted["wear"]
    yield output.text(
        (f"durable_every={plan['base_every']}, {log}", "bold"),
        f": training is slowed down by {predicted['overhead_percent']:.3f} %, "
        f"{100 * wasted:.3f} % of its time is wasted",
    )
    yield from (f"  {why}" for why in document["why"])
    terms = ("bases", "log", "wear", "lost", "load", "replay", "restart")
    yield "wasted on"
    yield output.pairs((name, f"{100 * predicted[name]:.4f} %") for name in terms)
    yield "what it rests on"
    told = {**document["machine"], "mtbf": document["mtbf_why"]}
    sources = document["sources"]
    yield output.columns(
        ("", "", ""),
        (
            (name, f"{value:.6g}" if isinstance(value, float) else value, sources.get(name, ""))
            for name, value in told.items()
        ),
    )
    yield "what else there is"
    yield output.columns(
        ("", "bases", "log", "slows down", "wasted", "but"), map(_other_cells, document["others"])
    )


def _other_cells(other: dict[str, Any]) -> tuple[Any, ...]:
    return (
        other["what"],
        other["plan"]["base_every"],
        other["plan"]["batch"],
        f"{other['predicted']['overhead_percent']:.3f} %",
        f"{100 * other['predicted']['total']:.3f} %",
        "; ".join(other["objections"]),
    )
