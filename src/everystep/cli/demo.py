"""`everystep demo`: the promise, kept before your eyes."""

from __future__ import annotations

from typing import Annotated

import typer

from everystep.cli import output


def demo(
    steps: Annotated[int, typer.Option(help="Train this many steps, each time.")] = 80,
    kills: Annotated[int, typer.Option(help="Kill the trainer this many times with kill -9.")] = 5,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Draw the instants of the kills from this number. Default: another each time."
        ),
    ] = None,
) -> output.Reply:
    """Train a small GPT without us, with us, and with us while it is killed; compare every bit."""
    from everystep.bench.demo import run_demo

    document, table = run_demo(steps=steps, kills=kills, seed=seed, say=output.say)
    code = output.OK if document["bit_identical"] else output.PROBLEM
    return output.Reply(document, lambda: [table], code)
