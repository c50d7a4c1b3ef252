"""Commands that read a store: `everystep ls`, `inspect`, `bisect`, `verify`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli import output
from everystep.cli.runs import RunName, documents_of, shown
from everystep.format.base import Base
from everystep.store.bases import read_base
from everystep.store.bisect import first_bad_step, metric_of
from everystep.store.bucket.client import is_url
from everystep.store.layout import name_of
from everystep.store.reader import open_run
from everystep.store.tags import tags_by_point
from everystep.store.verify import Report, verify_bucket, verify_run


def list_steps(run: RunName) -> output.Reply:
    """List the bases that a run keeps."""
    stored = open_run(documents_of(run))
    names = tags_by_point(stored.tags)
    bases: list[dict[str, Any]] = [
        {
            "step": base.entry.step,
            "term": base.term,
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
        {"step": point.step, "term": point.term, "tags": tags} for point, tags in names.items()
    ]
    document = {
        "run": shown(run),
        "run_id": stored.run_id,
        "bases": bases,
        "pinned_elsewhere": rewound,
        "problems": stored.problems,
    }

    def render() -> Iterator[Any]:
        yield shown(run)
        yield output.columns(
            ("step", "term", "written", "size", "new bytes", "metric", "tags"),
            map(_base_cells, bases),
        )
        for b in rewound:
            yield f"{' '.join(b['tags'])}: step {b['step']} of term {b['term']}, rewound over"
        yield from (output.text(("problem:", "red"), f" {p}") for p in stored.problems)

    return output.Reply(document, render, output.PROBLEM if stored.problems else output.OK)


def _base_cells(base: dict[str, Any]) -> tuple[Any, ...]:
    return (
        base["step"],
        base["term"],
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(base["time"])),
        output.size(base["total_bytes"]),
        output.size(base["new_bytes"]),
        "" if base["metric"] is None else f"{base['metric']:g}",
        " ".join((*base["tags"], *["(weights only)"] * base["weights_only"])),
    )


def bisect(
    run: RunName,
    metric: Annotated[
        str,
        typer.Option(
            help="Call a base bad by this: nonfinite, max-abs=LIMIT, norm=LIMIT, or module:function "
            "of its tensors."
        ),
    ] = "nonfinite",
) -> output.Reply:
    """Find the first kept step at which something is wrong; `everystep rewind` returns before it."""
    found = first_bad_step(open_run(run), metric_of(metric))

    def render() -> Iterator[Any]:
        if found.bad is None:
            yield f"nothing is wrong up to step {found.good}"
        else:
            yield output.text((f"step {found.bad}", "bold"), f" is the first bad one: {found.why}")
            yield f"the newest good step before it: {found.good}"
        yield output.text((f"looked at {', '.join(map(str, found.looked_at))}", "dim"))

    code = output.OK if found.bad is None else output.PROBLEM
    return output.Reply(found._asdict(), render, code)


def inspect(
    run: RunName,
    step: Annotated[
        str | None,
        typer.Argument(
            metavar="STEP",
            help="Look at the base of this step, this tag, or latest. Default: the newest that can be read.",
        ),
    ] = None,
) -> output.Reply:
    """Show what a base holds: atoms, optimizers, files."""
    stored = open_run(documents_of(run))
    found = stored.find(step) if step is not None else None
    base = stored.base() if found is None else read_base(stored.path, found)
    tags = [n for n, c in stored.tags.items() if c.point == base.point]
    atoms = _atoms(base)
    document = {
        "step": base.step,
        "term": base.point.term,
        "tags": tags,
        "exactness": base.census.exactness,
        "log_steps": base.tail_steps,
        "optimizers": [
            {"key": s.key, "class": s.path, "mode": s.mode.value, "why": s.why}
            for s in base.census.optimizers
        ],
        "files": [{"path": name_of(f), "bytes": f.bytes} for f in base.files],
        "atoms": atoms,
    }

    def render() -> Iterator[Any]:
        yield f"step {base.step}, term {base.point.term}, {base.census.exactness} {' '.join(tags)}"
        yield output.columns(
            ("atom", "type", "shape", "changed at", "slots"),
            (
                (a["name"], a["dtype"], list(a["shape"]), a["version"], " ".join(a["slots"]))
                for a in atoms
            ),
        )
        yield output.columns(
            ("file", "size"), ((name_of(f), output.size(f.bytes)) for f in base.files)
        )

    return output.Reply(document, render)


def _atoms(base: Base) -> list[dict[str, Any]]:
    slots: dict[int, list[str]] = {}
    for tensor in base.tensors:
        if tensor.slot:
            slots.setdefault(tensor.atom, []).append(tensor.slot.strip("/"))
    versions = {t.atom: t.version for t in base.tensors}
    return [
        {
            "name": atom.name,
            "dtype": atom.dtype,
            "shape": atom.shape,
            "buffer": atom.buffer,
            "aliases": atom.aliases,
            "slots": slots.get(i, []),
            "version": versions.get(i),
        }
        for i, atom in enumerate(base.census.atoms)
    ]


def verify(run: RunName) -> output.Reply:
    """Read every committed byte and compare it with its checksum."""
    began = time.perf_counter()
    with output.byte_progress("verify") as progress:
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
    code = output.PROBLEM if report.problems else output.OK
    return output.Reply(document, lambda: _verdict(report, seconds), code)


def _verdict(report: Report, seconds: float) -> Iterator[Any]:
    for problem in report.problems:
        yield output.text(("damaged:", "red"), f" {problem}")
    for note in report.notes:
        yield output.text(("the log:", "yellow"), f" {note}")
    newest = max(report.valid, default=None)
    logged = "" if report.log_step is None else f", by the log {report.log_step}"
    verdict = ("all is well", "green")
    if report.problems:
        verdict = ("damaged", "red")
    elif report.bases and not report.valid:
        verdict = ("nothing is known", "yellow")
    elif report.notes:
        verdict = ("every base is whole, the log is not", "yellow")
    yield output.text(
        verdict,
        f": {report.files} files, {output.size(report.bytes)} in {seconds:.2f} s; "
        f"newest valid step: {newest}{logged}",
    )
