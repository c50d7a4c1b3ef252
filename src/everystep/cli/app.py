"""All commands; `everystep/__main__.py` calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from everystep import __version__
from everystep.cli import output
from everystep.cli.bench import bench
from everystep.cli.demo import demo
from everystep.cli.doctor import doctor
from everystep.cli.prune import prune
from everystep.cli.reading import bisect, inspect, list_steps, verify
from everystep.cli.rewind import rewind
from everystep.cli.selfcheck import selfcheck
from everystep.cli.states import diff, export, tag
from everystep.cli.status import status
from everystep.cli.stop import stop
from everystep.cli.tune import tune

app = output.Commands(
    help="Make every training step a checkpoint, and look at runs. "
    "Exit codes: 0 all is well, 1 something is wrong with the run, 2 cannot be done as asked, "
    "130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        output.console.print(__version__)
        raise typer.Exit


@app.callback()
def everystep(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


_OF_A_RUN: list[Callable[..., output.Reply]] = [
    *(status, inspect, verify, bisect, rewind, stop),
    *(tag, prune, diff, export, tune),
]
_OF_THIS_MACHINE: list[Callable[..., output.Reply]] = [doctor, selfcheck, demo]

app.command("ls")(list_steps)
for command in (*_OF_A_RUN, *_OF_THIS_MACHINE):
    app.command()(command)
app.add_typer(bench, name="bench")
