"""How commands speak: words for people, one JSON document for programs, exit codes that mean something.

0  all is well      1  something is wrong with the run      2  cannot be done as asked      130  interrupted

A command returns a `Reply` and prints nothing itself; whatever is registered with `Commands` takes `--json`
and `--output`. What a reply shows is text and never markup: `text` is the one way to the terminal.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from everystep.cli.interrupt import interruptible
from everystep.core.sizes import size as size  # commands say output.size
from everystep.errors import EverystepError, StoreError, UsageError

OK, PROBLEM, REFUSED = 0, 1, 2
_NOT_PLAIN = re.compile(r"[^\x20-\x7e]")
_ENDLESS = 1 << 20  # columns: a pipe has no width

_Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of words and tables.")
]
_File = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write the JSON document to this file as well."
    ),
]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the result into this PNG file as well.")
]

console = Console(markup=False, emoji=False, highlight=False)
errors = Console(stderr=True, markup=False, emoji=False, highlight=False)
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


class Reply(NamedTuple):
    """What a command found: the document, and the lines and tables that people see of it."""

    document: Mapping[str, Any]
    render: Callable[[], Iterable[Any]]
    code: int = OK


class Commands(typer.Typer):
    """A group of commands, each a function that returns a Reply."""

    def command(self, *names: Any, **settings: Any) -> Callable[[Any], Any]:
        register = super().command(*names, **settings)

        def add(work: Callable[..., Reply]) -> Callable[..., Reply]:
            register(_spoken(work))
            return work

        return add


def _spoken(work: Callable[..., Reply]) -> Callable[..., None]:
    """The same command with the options that all of them have."""

    @functools.wraps(work)
    def command(*, json: bool, output: Path | None, **given: Any) -> None:
        with interruptible(), _refusals(json):
            check_writable(output)
            before = _quiet.set(json)
            try:
                reply = work(**given)
            finally:
                _quiet.reset(before)
            _show(reply, json, output)
        raise typer.Exit(reply.code)

    signature = inspect.signature(work, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter("json", kind, default=False, annotation=_Json),
        inspect.Parameter("output", kind, default=None, annotation=_File),
    ]
    parameters = [*signature.parameters.values(), *more]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def _show(reply: Reply, as_json: bool, file: Path | None) -> None:
    if file is not None:
        _write(file, reply.document)
    if as_json:
        sys.stdout.write(_encoded(reply.document).decode() + "\n")
        return
    for part in reply.render():
        _print(part)


@contextmanager
def _refusals(as_json: bool) -> Iterator[None]:
    """An error becomes two lines on stderr, or a document, and exit code 2."""
    try:
        yield
    except BrokenPipeError:  # whoever read what we print has gone
        raise
    except (EverystepError, OSError) as found:
        error = found if isinstance(found, EverystepError) else _of_the_system(found)
        message = str(error).partition("\nhint:")[0]
        document = {"error": message, "kind": type(error).__name__, "hint": error.hint}
        if as_json:
            sys.stdout.write(_encoded(document).decode() + "\n")
        else:
            _print_error(("error:", "red"), message)
            if error.hint:
                _print_error(("hint:", "bold"), error.hint)
        raise typer.Exit(REFUSED) from None


def _of_the_system(error: OSError) -> StoreError:
    return StoreError(
        f"use {error.filename or 'a file'}: {error.strerror}",
        hint="whoever runs this needs the right to read and write it, on a disk that works",
    )


def check_writable(file: Path | None) -> None:
    """Before anything is done: a measurement of ten minutes must not end here."""
    if file is not None:
        taken = file if file.exists() else file.parent
        if file.is_dir() or not taken.exists() or not os.access(taken, os.W_OK):
            raise UsageError(
                f"write {file}: it cannot be written", hint="give a file in a folder that exists"
            )


def _write(file: Path, document: Mapping[str, Any]) -> None:
    try:
        file.write_bytes(msgspec.json.format(_encoded(document)) + b"\n")
    except OSError as error:
        raise StoreError(f"write {file}: {error.strerror}") from error


def _encoded(document: Mapping[str, Any]) -> bytes:
    try:
        encoded = msgspec.json.encode(document)
    except UnicodeEncodeError:  # a path whose bytes are no UTF-8
        encoded = msgspec.json.encode(_speakable(msgspec.to_builtins(document)))
    return _NOT_PLAIN.sub(_escaped, encoded.decode()).encode()


def _escaped(found: re.Match[str]) -> str:
    """As JSON writes it, if it cannot be printed: what stays is the same document."""
    letter = found[0]
    if letter.isprintable():
        return letter
    return "".join(
        f"\\u{unit:04x}" for (unit,) in struct.iter_unpack(">H", letter.encode("utf-16-be"))
    )


def _speakable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_speakable(name): _speakable(inner) for name, inner in value.items()}
    return [_speakable(inner) for inner in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------- words


def text(*parts: str | tuple[str, str]) -> Text:
    """One line of strings, some with a style: `text(("damaged:", "red"), f" {problem}")`. Whatever cannot be
    printed is escaped as in Python: names are users', and a terminal obeys some of them."""
    styled = (part if isinstance(part, tuple) else (part, "") for part in parts)
    return Text.assemble(*((_printable(words), style) for words, style in styled))


def _printable(words: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


def pairs(rows: Iterable[tuple[str, Any]]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(text((name, "dim")), text(str(value)))
    return table


def columns(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """The first column holds names: it is never wrapped, whatever the others need."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for place, name in enumerate(names):
        table.add_column(text(name), no_wrap=not place, overflow="fold")
    for row in rows:
        table.add_row(*(text(str(cell)) for cell in row))
    return table


class _Whole:
    """A table of which nothing is cut: a terminal's width is kept as long as no word has to be broken for
    it, a pipe has none."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(width=_ENDLESS), self._table)
        wide = max(options.max_width, needed.minimum) if console.file.isatty() else needed.maximum
        yield from console.render(self._table, options.update(width=wide))


def _print(part: Any) -> None:
    if isinstance(part, Table):
        console.print(_Whole(part), crop=False)
    else:
        words = part if isinstance(part, Text) else text(part)
        console.print(words, soft_wrap=True)


def _print_error(label: tuple[str, str], message: str) -> None:
    first, *others = message.split("\n")
    errors.print(text(label, f" {first}"), soft_wrap=True)
    for line in others:
        errors.print(text(f"  {line}"), soft_wrap=True)


# ---------------------------------------------------------------------- meanwhile


def say(line: str) -> None:
    """How a long command comes along, beside what it returns; not where a program reads."""
    if not _quiet.get():
        errors.print(text(line), soft_wrap=True)


@contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; nothing in a pipe."""
    if _quiet.get() or not errors.is_terminal:
        yield lambda done, total: None
        return
    shown = TextColumn(label, markup=False)
    bar = Progress(shown, BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=errors)
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def draw(file: Path, work: Callable[[Path], bool]) -> None:
    """Have a picture drawn, if matplotlib is here."""
    try:
        drawn = work(file)
    except (OSError, ValueError) as error:  # of a kind of picture that is not known
        raise UsageError(f"draw {file}: {error}", hint="give a file that ends in .png") from error
    if not drawn:
        say("no picture: pip install everystep[bench] brings matplotlib")


def confirm(what: str, yes: bool) -> None:
    """Return if a person agrees to what cannot be undone; where nobody can be asked, --yes has to say it."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{what}: nobody can be asked here", hint="add --yes if that is wanted")
    errors.print(text(f"{what}. Go on? [y/N] "), soft_wrap=True, end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError(f"{what}: not confirmed, nothing was changed")
