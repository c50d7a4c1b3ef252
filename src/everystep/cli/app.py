"""`everystep` and `python -m everystep`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep import __version__
from everystep.cli import output
from everystep.cli.bench import bench
from everystep.cli.doctor import examine
from everystep.cli.prune import prune
from everystep.cli.runs import RunName, bucket_of, documents_of, shown
from everystep.cli.selfcheck import selfcheck
from everystep.cli.states import diff, export, tag
from everystep.cli.status import run_status
from everystep.cli.stop import stop
from everystep.cli.tune import tune
from everystep.format.base import Point
from everystep.store.bases import read_index
from everystep.store.bisect import first_bad_step, metric_of
from everystep.store.bucket import is_url
from everystep.store.reader import open_run
from everystep.store.tags import tags_by_point

app = typer.Typer(
    help="Every training step is a checkpoint. Exit codes: 0 well, 1 something is wrong, 2 refused.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = output.Json


def _say_version(wanted: bool) -> None:
    if wanted:
        output.console.print(__version__)
        raise typer.Exit


@app.callback()
def everystep(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Say it and end."),
    ] = False,
) -> None:
    pass


@app.command()
def status(run: RunName, json: Json = False) -> None:
    """What each fault would cost right now."""
    with output.refusals(json):
        document = run_status(documents_of(run).absolute(), bucket_of(run))

    def render() -> Iterator[Any]:
        yield f"[bold]{document['summary']}[/bold]"
        hidden = ("summary", "optimizers", "exactness_why", "outlives_why")
        yield output.pairs("", ((k, v) for k, v in document.items() if k not in hidden))
        for name in ("exactness_why", "outlives_why"):
            if document.get(name):
                yield f"[dim]{document[name]}[/dim]"

    output.show(document, json, render)
    raise typer.Exit(0 if document["health"] == "ok" else output.PROBLEM)


@app.command("ls")
def list_steps(run: RunName, json: Json = False) -> None:
    """The retained steps of a run."""
    with output.refusals(json):
        stored = open_run(documents_of(run))
        names = tags_by_point(stored.tags)
    bases: list[dict[str, Any]] = [
        {
            "step": base.entry.step,
            "epoch": base.epoch,
            "time": base.entry.time,
            "total_bytes": base.entry.total_bytes,
            "new_bytes": base.entry.new_bytes,
            "metric": base.entry.metric,
            "tags": names.pop(base.point, ()),
            "weights_only": base.weights_only,
        }
        for base in stored.bases
    ]
    rewound: list[dict[str, Any]] = [  # pinned bases that the run was rewound over
        {"step": point.step, "epoch": point.epoch, "tags": tags} for point, tags in names.items()
    ]
    document = {
        "run": shown(run),
        "run_id": stored.run_id,
        "bases": bases,
        "pinned_elsewhere": rewound,
    }

    def render() -> Iterator[Any]:
        yield output.columns(
            shown(run),
            ("step", "epoch", "written", "size", "new bytes", "metric", "tags"),
            (
                (
                    b["step"],
                    b["epoch"],
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(b["time"])),
                    output.size(b["total_bytes"]),
                    output.size(b["new_bytes"]),
                    "" if b["metric"] is None else f"{b['metric']:g}",
                    " ".join((*b["tags"], *["(weights only)"] * b["weights_only"])),
                )
                for b in bases
            ),
        )
        for b in rewound:
            yield f"{' '.join(b['tags'])}: step {b['step']} of epoch {b['epoch']}, rewound over"

    output.show({**document, "problems": stored.problems}, json, render)
    raise typer.Exit(output.PROBLEM if stored.problems else 0)


@app.command()
def restore(
    run: RunName,
    step: Annotated[int, typer.Option(help="Any step between the oldest base and the newest.")],
    json: Json = False,
) -> None:
    """Have the next attach begin at this step; what comes behind it no longer counts."""
    from everystep.cli.restore import restore_to

    with output.refusals(json):
        document = restore_to(open_run(run).path, step)

    def render() -> Iterator[Any]:
        logged = document["redone_from_the_log"]
        more = f", {logged} of its steps redone from the log" if logged else ""
        yield f"[bold]step {step}[/bold]: the next attach goes on from it{more}"
        yield from document["problems"]

    output.show(document, json, render)


@app.command()
def bisect(
    run: RunName,
    metric: Annotated[
        str,
        typer.Option(help="nonfinite, max-abs=LIMIT, norm=LIMIT, or module:function of tensors."),
    ] = "nonfinite",
    json: Json = False,
) -> None:
    """The first retained step at which something is wrong; `run.rewind` returns before it."""
    with output.refusals(json):
        found = first_bad_step(open_run(run), metric_of(metric))
    document = found._asdict()

    def render() -> Iterator[Any]:
        if found.bad is None:
            yield f"nothing is wrong up to step {found.good}"
        else:
            yield f"[bold]step {found.bad}[/bold] is the first bad one: {found.why}"
            yield f"the newest good step before it: {found.good}"
        yield f"[dim]looked at {', '.join(map(str, found.looked_at))}[/dim]"

    output.show(document, json, render)
    raise typer.Exit(output.PROBLEM if found.bad is not None else 0)


@app.command()
def inspect(
    run: RunName,
    step: Annotated[
        str | None, typer.Argument(help="A retained step or a tag; the newest if absent.")
    ] = None,
    json: Json = False,
) -> None:
    """What a base holds: atoms, optimizers, files."""
    with output.refusals(json):
        stored = open_run(documents_of(run))
        found = stored.find(step) if step is not None else None
        index = stored.index() if found is None else read_index(stored.path, found)
        tags = [n for n, c in stored.tags.items() if c.point == Point(index.epoch, index.step)]
    slots: dict[int, list[str]] = {}
    for tensor in index.tensors:
        if tensor.slot:
            slots.setdefault(tensor.atom, []).append(tensor.slot.strip("/"))
    versions = {t.atom: t.version for t in index.tensors}
    atoms: list[dict[str, Any]] = [
        {
            "name": atom.name,
            "dtype": atom.dtype,
            "shape": atom.shape,
            "buffer": atom.buffer,
            "aliases": atom.aliases,
            "slots": slots.get(i, []),
            "version": versions.get(i),
        }
        for i, atom in enumerate(index.census.atoms)
    ]
    document = {
        "step": index.step,
        "epoch": index.epoch,
        "tags": tags,
        "exactness": index.census.exactness,
        "log_steps": index.tail_steps,
        "optimizers": [
            {"key": s.key, "class": s.path, "mode": s.mode.value, "why": s.why}
            for s in index.census.optimizers
        ],
        "files": [{"path": f.path, "bytes": f.bytes} for f in index.files],
        "atoms": atoms,
    }

    def render() -> Iterator[Any]:
        yield f"step {index.step}, epoch {index.epoch}, {index.census.exactness} {' '.join(tags)}"
        yield output.columns(
            "",
            ("atom", "type", "shape", "changed at", "slots"),
            (
                (a["name"], a["dtype"], list(a["shape"]), a["version"], " ".join(a["slots"]))
                for a in atoms
            ),
        )
        yield output.columns(
            "", ("file", "size"), ((f.path, output.size(f.bytes)) for f in index.files)
        )

    output.show(document, json, render)


@app.command()
def verify(run: RunName, json: Json = False) -> None:
    """Read every committed byte and compare it with its checksum."""
    began = time.perf_counter()
    with output.refusals(json), output.byte_progress("verify", json) as progress:
        from everystep.store.verify import verify_bucket, verify_run

        local = not is_url(run)
        report = (
            verify_run(Path(run).absolute(), progress) if local else verify_bucket(run, progress)
        )
    seconds = time.perf_counter() - began
    document = {
        "ok": not report.problems,
        "problems": report.problems,
        "bases": report.bases,
        "valid_steps": sorted(report.valid),
        "log_step": report.log_step,
        "notes": report.notes,
        "files": report.files,
        "bytes": report.bytes,
        "seconds": seconds,
        "gigabytes_per_second": report.bytes / seconds / 1e9,
    }

    def render() -> Iterator[Any]:
        for problem in report.problems:
            yield f"[red]damaged:[/red] {problem}"
        yield from (f"[yellow]the log:[/yellow] {note}" for note in report.notes)
        newest = max(report.valid, default=None)
        logged = "" if report.log_step is None else f", by the log {report.log_step}"
        verdict = "[green]all is well[/green]" if not report.problems else "[red]damaged[/red]"
        yield (
            f"{verdict}: {report.files} files, {output.size(report.bytes)} in {seconds:.2f} s; "
            f"newest valid step: {newest}{logged}"
        )

    output.show(document, json, render)
    raise typer.Exit(output.PROBLEM if report.problems else 0)


@app.command()
def doctor(json: Json = False) -> None:
    """What this machine offers: memory, limits, whether a shadow outlives its trainer here."""
    document = examine()
    colours = {"ok": "green", "note": "yellow", "bad": "red"}

    def render() -> Iterator[Any]:
        for finding in document["findings"]:
            yield f"[{colours[finding['level']]}]{finding['level']:>4}[/] {finding['what']}"
        yield output.pairs("", (*document["facts"].items(), *document["versions"].items()))

    output.show(document, json, render)
    raise typer.Exit(0 if document["ok"] else output.PROBLEM)


@app.command()
def demo(
    json: Json = False,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 80,
    kills: Annotated[int, typer.Option(help="How often the trainer is killed with kill -9.")] = 5,
    seed: Annotated[int | None, typer.Option(help="Of the instants of the kills.")] = None,
) -> None:
    """Train a small GPT without us, with us, and with us while being killed; compare every bit."""
    from everystep.bench.demo import run_demo

    with output.refusals(json):
        document, table = run_demo(steps=steps, kills=kills, seed=seed, quiet=json)
    output.show(document, json, lambda: [table])
    raise typer.Exit(0 if document["bit_identical"] else output.PROBLEM)


app.add_typer(bench, name="bench")
for command in (selfcheck, stop, tune, tag, prune, diff, export):
    app.command()(command)


def main() -> None:
    app()
