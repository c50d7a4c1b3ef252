"""Commands about single steps: `everystep tag`, `diff`, `export`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli import output
from everystep.cli.runs import RunName
from everystep.errors import StepUnavailable
from everystep.store.reader import open_run
from everystep.store.tags import remove_tag, set_tag

Step = Annotated[str, typer.Argument(help="A retained step, a tag, or latest.", show_default=False)]
Json = output.Json


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"


def tag(
    run: RunName,
    step: Step,
    name: Annotated[str, typer.Argument(help="Of the tag.", show_default=False)],
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away.")] = False,
    json: Json = False,
) -> None:
    """Pin the base of a step under a name: no retention rule removes it."""
    with output.refusals(json):
        stored = open_run(run)
        path = stored.path
        candidate = stored.find(step)
        if remove:
            _check_place(stored.find(name).entry.step, candidate.entry.step, name)
            remove_tag(path, name)
        else:
            candidate = set_tag(path, name, candidate.entry.step)
    document = {"run": str(path), "tag": name, "step": candidate.entry.step, "removed": remove}
    word = "is no longer" if remove else "is"
    output.show(document, json, lambda: [f"{name} {word} step {candidate.entry.step}"])


def _check_place(found: int, expected: int, name: str) -> None:
    if found != expected:
        raise StepUnavailable(
            f"tag {name!r}: it is at step {found}, not {expected}", hint=f"give step {found}"
        )


def diff(
    run: RunName,
    a: Step,
    b: Step,
    slots: Annotated[bool, typer.Option("--slots", help="Optimizer slots too.")] = False,
    json: Json = False,
) -> None:
    """How far two steps are apart: what changed, by how much, atom by atom."""
    with output.refusals(json):
        path = open_run(run).path
        from everystep.recover.diff import Difference, compare, total
        from everystep.recover.state import open_state

        before, after = open_state(path, a), open_state(path, b)
        found = list(compare(before, after, slots=slots))

    def row(d: Difference) -> dict[str, Any]:
        return {
            "name": d.name,
            "changed": d.changed,
            "note": d.note,
            "max_change": d.max_change,
            "relative_change": d.relative_change,
            "change_norm": d.change_norm,
            "norm_before": d.norm_before,
            "norm_after": d.norm_after,
        }

    document: dict[str, Any] = {
        "run": str(path),
        "a": before.step,
        "b": after.step,
        "changed": sum(d.changed for d in found),
        "atoms": [row(d) for d in found],
        "total": row(total(found)),
    }

    def render() -> Iterator[Any]:
        names = ("atom", "changed", "max", "relative", f"norm at {before.step}", f"at {after.step}")
        rows = [_cells(d) for d in (*document["atoms"], document["total"])]
        yield output.columns(f"step {before.step} to {after.step}", names, rows)

    output.show(document, json, render)


def _cells(d: dict[str, Any]) -> tuple[str, ...]:
    if d["note"]:
        return (d["name"], d["note"], "", "", "", "")
    relative = "" if d["relative_change"] is None else f"{d['relative_change']:.3g}"
    norms = (f"{d['norm_before']:.5g}", f"{d['norm_after']:.5g}")
    return (d["name"], "yes" if d["changed"] else "no", f"{d['max_change']:.3g}", relative, *norms)


def export(
    run: RunName,
    step: Step,
    to: Annotated[Format, typer.Option(help="What the file is to be.", show_default=False)],
    file: Annotated[
        Path | None, typer.Option("--output", help="Default: RUN's name and the step, here.")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Without the optimizer (safetensors: always).")
    ] = False,
    json: Json = False,
) -> None:
    """A step as a file: the weights as safetensors, or model and optimizer as torch saves them."""
    with output.refusals(json), output.byte_progress("export", json) as progress:
        path = open_run(run).path
        from everystep.recover.state import open_state

        state = open_state(path, step)
        suffix = "safetensors" if to is Format.SAFETENSORS else "pt"
        target = (file or Path(f"{path.name}-{state.step}.{suffix}")).absolute()
        from everystep.recover.export import export_safetensors, export_torch

        if to is Format.SAFETENSORS:
            written = export_safetensors(state, target, progress)
        else:
            written = export_torch(state, target, progress, weights_only=weights_only)
    document = {"run": str(path), "step": state.step, "file": str(target), "bytes": written}
    output.show(
        document, json, lambda: [f"step {state.step} is in {target}, {output.size(written)}"]
    )
