"""`everystep selfcheck`: which twin gives which optimizer's bits, on this machine with this torch."""

from __future__ import annotations

from typing import Annotated

import typer

from everystep.cli import output


def selfcheck(
    elements: Annotated[int, typer.Option(help="Give the largest tensor this many elements.")] = 1
    << 20,
    steps: Annotated[
        int, typer.Option(help="Take this many steps, each with another learning rate.")
    ] = 200,
) -> output.Reply:
    """Step awkward values through torch's optimizers and through the twins; count what differs."""
    from everystep.replay.table import check_all

    document = check_all(elements, steps)
    names = ("optimizer", "implementation", "dtype", "device", "differing", "twin", "tier")
    rows = [[row[name] for name in names] for row in document["rows"]]
    title = f"torch {document['torch']}, {elements} elements, {steps} steps"
    return output.Reply(document, lambda: [title, output.columns(names, rows)])
