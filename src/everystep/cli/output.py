"""How commands speak: tables for people, one JSON document for programs, exit codes that mean something.

0  all is well        1  something is wrong with the run        2  cannot be done as asked
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Table

from everystep.core.sizes import size as size  # commands say output.size
from everystep.errors import EverystepError

PROBLEM, REFUSED = 1, 2
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

console = Console()
errors = Console(stderr=True)


def show(document: Mapping[str, Any], as_json: bool, render: Callable[[], Iterable[Any]]) -> None:
    """Print the document itself, or what `render` makes of it."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return
    for part in render():
        console.print(part)


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """An error becomes two lines on stderr, or a document, and exit code 2."""
    try:
        yield
    except EverystepError as error:
        message = str(error).partition("\nhint:")[0]
        if as_json:
            document = {"error": message, "kind": type(error).__name__, "hint": error.hint}
            sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        else:
            errors.print(f"[red]error:[/red] {message}", highlight=False)
            if error.hint:
                errors.print(f"[bold]hint:[/bold] {error.hint}", highlight=False)
        raise typer.Exit(REFUSED) from None


def pairs(title: str, rows: Iterable[tuple[str, Any]]) -> Table:
    table = Table(
        title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    for name, value in rows:
        table.add_row(f"[dim]{name}[/dim]", str(value))
    return table


def columns(title: str, names: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


@contextmanager
def byte_progress(label: str, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; nothing in a pipe."""
    if as_json or not errors.is_terminal:
        yield lambda done, total: None
        return
    bar = Progress(label, BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=errors)
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
