"""`everystep bench`: measurements of this machine, each by one command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from everystep.cli import output
from everystep.options import duration_seconds

_Optimizer = Annotated[str, typer.Option(help="sgd, adam, adamw, adam-fused or adamw-fused.")]

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.command("verify")
def bench_verify(
    json: output.Json = False,
    gigabytes: Annotated[float, typer.Option(help="Size of the store made for it.")] = 1.0,
) -> None:
    """How fast `everystep verify` reads a healthy store."""
    from everystep.bench.verify_speed import verify_speed

    with output.refusals(json):
        document = verify_speed(int(gigabytes * 1e9))
    output.show(document, json, lambda: [output.pairs("everystep verify", document.items())])


@bench.command("copy")
def bench_copy(
    json: output.Json = False,
    folder: Annotated[Path | None, typer.Option(help="Whose disk is measured.")] = None,
    gigabytes: Annotated[float, typer.Option(help="Written to the disk for each figure.")] = 2.0,
) -> None:
    """How fast bytes move here: memory, GPU and disk."""
    from everystep.bench.links import links

    with output.refusals(json):
        document = links(folder, int(gigabytes * 1e9))
    output.show(document, json, lambda: [_rates(document)])


@bench.command("overhead")
def bench_overhead(
    model: Annotated[
        str, typer.Option(help="gpt-tiny, gpt-124m, gpt-350m or gpt-1.3b.")
    ] = "gpt-tiny",
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    every: Annotated[int, typer.Option(help="Steps from one checkpoint to the next.")] = 1,
    steps: Annotated[int, typer.Option(help="Of each window that is measured.")] = 40,
    optimizer: _Optimizer = "adamw-fused",
    methods: Annotated[str, typer.Option(help="Some of them, with commas; default: all.")] = "",
    json: Annotated[
        Path | None, typer.Option(help="File for the figures; a PNG lies beside it.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Train through torch.compile.")
    ] = False,
    busy_loader: Annotated[
        bool, typer.Option("--busy-loader", help="Half the cores are busy.")
    ] = False,
    compress: Annotated[
        str, typer.Option(help="Compress gradients: topk, randomk, int8, fp8 or bf16.")
    ] = "",
    ratio: Annotated[float, typer.Option(help="The share that topk and randomk keep.")] = 0.01,
    patience: Annotated[float, typer.Option(help="Seconds after which a window ends.")] = 60.0,
    folder: Annotated[Path | None, typer.Option(help="Where checkpoints go.")] = None,
) -> None:
    """What a checkpoint every few steps costs: none, ours, and the peers that are installed."""
    from everystep.bench.methods import LOGS, METHODS
    from everystep.bench.overhead import Settings, overhead

    usual = [name for name in METHODS if name not in LOGS]
    wanted = tuple(methods.split(",") if methods else [*usual, *LOGS] if compress else usual)
    settings = Settings(
        model,
        batch,
        every,
        steps,
        optimizer,
        wanted,
        compile,
        busy_loader,
        patience,
        folder,
        compress,
        ratio,
    )
    with output.refusals(False):
        document = overhead(settings, output.console.print)
        if json is not None:
            from everystep.bench.plot import plot_overhead

            json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
            if not plot_overhead(document, json.with_suffix(".png")):
                output.errors.print("no picture: pip install everystep[bench] brings matplotlib")
    output.show(document, False, lambda: [_methods(document)])


@bench.command("replay")
def bench_replay(
    json: output.Json = False,
    parameters: Annotated[int, typer.Option(help="Of the state that is moved.")] = 50_000_000,
    threads: Annotated[int | None, typer.Option(help="Default: as many as a shadow uses.")] = None,
) -> None:
    """How fast the shadow redoes steps: twins for k records in one pass, and torch's own kernels."""
    from everystep.bench.replay_speed import replay_speed

    with output.refusals(json):
        document = replay_speed(parameters, threads)
    output.show(document, json, lambda: [_replay_rates(document)])


def _replay_rates(document: dict[str, Any]) -> Table:
    names = ("billion parameters/s", "k = 1", "2", "4", "8", "memory's share at k = 8")
    rows: list[tuple[Any, ...]] = [
        (name, f"{document[name]:.2f}", "", "", "", "") for name in ("torch_fused", "torch_foreach")
    ]
    for name, rates in document.items():
        share = document.get(f"{name}_memory_share")
        if share is not None:
            shown = (f"{rate:.2f}" for rate in rates.values())
            rows.append((name, *shown, f"{100 * share['8']:.0f} %"))
    return output.columns(f"{document['threads']} threads", names, rows)


_Model = Annotated[str, typer.Option(help="gpt-tiny, gpt-124m, gpt-350m or gpt-1.3b.")]
_Batch = Annotated[int, typer.Option(help="Sequences a step.")]
_Folder = Annotated[Path | None, typer.Option(help="Where checkpoints go.")]


@bench.command("base")
def bench_base(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "sgd",
    steps: Annotated[int, typer.Option(help="Of the windows before and after.")] = 20,
    folder: _Folder = None,
    json: output.Json = False,
) -> None:
    """What a base costs that is taken while training goes on, its bits, and its way to the disk."""
    from everystep.bench.events import base_cost

    _show_event(json, lambda: base_cost(model, batch, optimizer, steps, folder))


@bench.command("log")
def bench_log(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "adamw-fused",
    steps: Annotated[int, typer.Option(help="That are logged, and redone.")] = 100,
    compress: Annotated[str, typer.Option(help="How gradients are compressed; - : not.")] = "topk",
    ratio: Annotated[float, typer.Option(help="The share that topk and randomk keep.")] = 0.01,
    folder: _Folder = None,
    json: output.Json = False,
) -> None:
    """How large a log is, how fast it is written, and what redoing it takes against training again."""
    from everystep.bench.log_cost import log_cost

    method = "" if compress == "-" else compress
    _show_event(json, lambda: log_cost(model, batch, optimizer, steps, method, ratio, folder))


@bench.command("convergence")
def bench_convergence(
    steps: Annotated[int, typer.Option(help="Of each training.")] = 300,
    json: Annotated[
        Path | None, typer.Option(help="File for the figures; a PNG lies beside it.")
    ] = None,
) -> None:
    """What compressing gradients costs in loss: the demo's GPT, dense and compressed in every way."""
    from everystep.bench.convergence import convergence

    with output.refusals(False):
        document = convergence(steps, output.console.print)
        if json is not None:
            from everystep.bench.plot import plot_losses

            json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
            plot_losses(document, json.with_suffix(".png"))


@bench.command("pause")
def bench_pause(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "adamw-fused",
    seconds: Annotated[float, typer.Option(help="How long the shadow stands still.")] = 20.0,
    folder: _Folder = None,
    json: output.Json = False,
) -> None:
    """What training notices of a shadow that stands still (SIGSTOP), and when it is back."""
    from everystep.bench.events import pause_cost

    _show_event(json, lambda: pause_cost(model, batch, optimizer, seconds, folder))


@bench.command("resume")
def bench_resume(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "adamw-fused",
    folder: _Folder = None,
    json: output.Json = False,
) -> None:
    """How long it takes after SIGKILL until the next trainer has its state back."""
    from everystep.bench.events import resume_cost

    _show_event(json, lambda: resume_cost(model, batch, optimizer, folder))


@bench.command("tune")
def bench_tune(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "adamw",
    steps: Annotated[int, typer.Option(help="Of each window that is measured.")] = 60,
    rounds: Annotated[
        int, typer.Option(help="Windows of each kind: an even number, their order turns.")
    ] = 4,
    bases: Annotated[int, typer.Option(help="Written first, to see what they cost.")] = 8,
    mtbf: Annotated[str, typer.Option(help="Short, so that the plan's bases fit a window.")] = "1m",
    budget: Annotated[float, typer.Option(help="Percent that training may lose.")] = 5.0,
    folder: _Folder = None,
    json: output.Json = False,
) -> None:
    """The overhead that the tuner predicts for its plan, against the one that is measured."""
    from everystep.bench.tune_check import Settings, tune_check

    say = (lambda line: None) if json else output.console.print
    seconds = duration_seconds("mtbf", mtbf)
    settings = Settings(model, batch, optimizer, steps, rounds, bases, seconds, budget, folder)
    _show_event(json, lambda: tune_check(settings, say))


def _show_event(json: bool, measure: Callable[[], dict[str, Any]]) -> None:
    with output.refusals(json):
        document = measure()
    flat = (
        (f"{name} {inner}", value)
        for name, part in document.items()
        for inner, value in (part.items() if isinstance(part, dict) else [("", part)])
    )
    output.show(document, json, lambda: [output.pairs("", flat)])


def _rates(document: dict[str, Any]) -> Table:
    def rows(prefix: str, part: dict[str, Any]) -> Iterator[tuple[str, str]]:
        for name, value in part.items():
            if isinstance(value, dict):
                yield from rows(f"{prefix}{name} ", value)
            elif isinstance(value, float):
                yield f"{prefix}{name}", f"{value / 1e9:.2f} GB/s"
            else:
                yield f"{prefix}{name}", str(value)

    return output.pairs("", rows("", document))


def _methods(document: dict[str, Any]) -> Table:
    names = (
        "method",
        "median",
        "p99",
        "ratio",
        "GPU peak",
        "driver",
        "host stall",
        "device stall",
        "lag",
        "bases",
    )
    rows = []
    for name, found in document["methods"].items():
        stall, device = found.get("stall_seconds"), found.get("device_stall_seconds")
        rows.append(
            (
                name,
                f"{1e3 * found['median_seconds']:.1f} ms",
                f"{1e3 * found['p99_seconds']:.1f} ms",
                f"{found['ratio']:.4f}",
                f"{found['peak_gpu_bytes_more'] / 2**20:+.0f} MiB",
                f"{found['driver_gpu_bytes_more'] / 2**20:+.0f} MiB",
                "" if stall is None else f"{stall:.3f} s",
                "" if device is None else f"{device:.3f} s",
                "" if found.get("lag_steps") is None else found["lag_steps"],
                found.get("bases_written", ""),
            )
        )
    title = f"{document['model']}, batch {document['batch']}, every {document['every']}"
    return output.columns(
        f"{title}, none spreads {100 * document['none_spread']:.1f} %", names, rows
    )
