"""`everystep selfcheck`: which twin gives which optimizer's bits, on this machine with this torch."""

from __future__ import annotations

from typing import Annotated

import typer

from everystep.cli import output


def selfcheck(
    json: output.Json = False,
    elements: Annotated[int, typer.Option(help="Of the largest tensor.")] = 1 << 20,
    steps: Annotated[int, typer.Option(help="Each with another learning rate.")] = 200,
) -> None:
    """Step awkward values through torch's optimizers and through the twins; count what differs."""
    with output.refusals(json):
        from everystep.replay.table import check_all

        document = check_all(elements, steps)
    names = ("optimizer", "implementation", "dtype", "device", "differing", "twin", "tier")
    rows = [tuple(str(row[name]) for name in names) for row in document["rows"]]
    title = f"torch {document['torch']}, {elements} elements, {steps} steps"
    output.show(document, json, lambda: [output.columns(title, names, rows)])
