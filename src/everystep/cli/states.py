"""Commands about single steps: `everystep tag`, `diff`, `export`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from everystep.cli import output
from everystep.cli.runs import RunName
from everystep.errors import StepUnavailable, UsageError
from everystep.lane.runtime import read_card, runtime_dir
from everystep.store.bucket.tiers import locate
from everystep.store.reader import open_run
from everystep.store.tags import remove_tag, set_tag
from everystep.text import redacted


def _step(name: str) -> Any:
    return typer.Argument(
        metavar=name, help="Take the base of this step, this tag, or latest.", show_default=False
    )


Step = Annotated[str, _step("STEP")]


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    TORCH = "torch"


def tag(
    run: RunName,
    step: Step,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Give the tag this name.", show_default=False)
    ],
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the tag instead of setting it.")
    ] = False,
) -> output.Reply:
    """Pin the base of a step under a name: no retention rule removes it."""
    path, url = locate(run)
    if url is not None:
        _check_shipped(path, url, name)
    stored = open_run(path)
    candidate = stored.find(step)
    if remove:
        _check_place(stored.find(name).entry.step, candidate.entry.step, name)
        remove_tag(path, name)
    else:
        candidate = set_tag(path, name, candidate.entry.step)
    document = {"run": str(path), "tag": name, "step": candidate.entry.step, "removed": remove}
    word = "is no longer" if remove else "is"
    return output.Reply(document, lambda: [f"{name} {word} step {candidate.entry.step}"])


def _check_shipped(path: Path, url: str, name: str) -> None:
    """Tags go to a bucket with what its writer commits: one that is put there beside it would not last."""
    if read_card(runtime_dir(str(path))) is None:
        raise UsageError(
            f"tag {name!r} of {redacted(url)}: a bucket has the tags of the directory that is shipped to it, "
            "and nobody ships from this host",
            hint="give the directory of the run, on the host that trains; a tag that is set after training "
            f"goes to the bucket when the next attach there ships (for run=URL the directory is {path})",
        )


def _check_place(found: int, expected: int, name: str) -> None:
    if found != expected:
        raise StepUnavailable(
            f"tag {name!r}: it is at step {found}, not {expected}", hint=f"give step {found}"
        )


def diff(
    run: RunName,
    a: Annotated[str, _step("A")],
    b: Annotated[str, _step("B")],
    slots: Annotated[bool, typer.Option("--slots", help="Compare optimizer slots too.")] = False,
) -> output.Reply:
    """Compare two steps: what changed, by how much, atom by atom."""
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
        yield f"step {before.step} to {after.step}"
        yield output.columns(names, rows)

    return output.Reply(document, render)


def _cells(d: dict[str, Any]) -> tuple[str, ...]:
    if d["note"]:
        return (d["name"], d["note"], "", "", "", "")
    relative = "" if d["relative_change"] is None else f"{d['relative_change']:.3g}"
    norms = (f"{d['norm_before']:.5g}", f"{d['norm_after']:.5g}")
    return (d["name"], "yes" if d["changed"] else "no", f"{d['max_change']:.3g}", relative, *norms)


def export(
    run: RunName,
    step: Step,
    to: Annotated[Format, typer.Option(help="Write a file of this kind.", show_default=False)],
    file: Annotated[
        Path | None,
        typer.Option(help="Write to this file. Default: RUN-STEP.pt or .safetensors, here."),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Leave the optimizer out (safetensors: always)."),
    ] = False,
) -> output.Reply:
    """Write a step to a file: the weights as safetensors, or model and optimizer as torch saves them."""
    with output.byte_progress("export") as progress:
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
    line = f"step {state.step} is in {target}, {output.size(written)}"
    return output.Reply(document, lambda: [line])
