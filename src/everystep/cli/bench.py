"""`everystep bench`: measurements of this machine, each by one command."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from everystep.cli import output
from everystep.option_values import duration_seconds

_Model = Annotated[
    str, typer.Option(help="Train this model: gpt-tiny, gpt-124m, gpt-350m or gpt-1.3b.")
]
_Batch = Annotated[int, typer.Option(help="Train on this many sequences a step.")]
_Optimizer = Annotated[str, typer.Option(help="Use sgd, adam, adamw, adam-fused or adamw-fused.")]
_Folder = Annotated[
    Path | None,
    typer.Option(
        help="Write checkpoints below this folder. Default: the folder for temporary files."
    ),
]
_Ratio = Annotated[
    float, typer.Option(help="Keep this share of a gradient with topk and randomk, 0 to 1.")
]

bench = output.Commands(help="Measure this machine.", no_args_is_help=True)


@bench.command("verify")
def bench_verify(
    gigabytes: Annotated[float, typer.Option(help="Make a store of this many GB for it.")] = 1.0,
) -> output.Reply:
    """Measure how fast `everystep verify` reads a healthy store."""
    from everystep.bench.verify_speed import verify_speed

    return _measured(verify_speed(int(gigabytes * 1e9)))


@bench.command("copy")
def bench_copy(
    folder: Annotated[
        Path | None,
        typer.Option(help="Measure the disk of this folder. Default: that of temporary files."),
    ] = None,
    gigabytes: Annotated[float, typer.Option(help="Write this many GB for each figure.")] = 2.0,
) -> output.Reply:
    """Measure how fast bytes move here: memory, GPU and disk."""
    from everystep.bench.links import links

    document = links(folder, int(gigabytes * 1e9))
    return output.Reply(document, lambda: [_rates(document)])


@bench.command("overhead")
def bench_overhead(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    every: Annotated[int, typer.Option(help="Take a checkpoint every N steps.")] = 1,
    steps: Annotated[int, typer.Option(help="Measure windows of this many steps.")] = 40,
    optimizer: _Optimizer = "adamw-fused",
    methods: Annotated[
        str,
        typer.Option(help="Measure these, separated by commas. Default: all that are installed."),
    ] = "",
    compile: Annotated[
        bool, typer.Option("--compile", help="Train through torch.compile.")
    ] = False,
    busy_loader: Annotated[
        bool, typer.Option("--busy-loader", help="Keep half of the cores busy, as a loader would.")
    ] = False,
    compress: Annotated[
        str,
        typer.Option(
            help="Compress gradients: topk, randomk, int8, fp8 or bf16. Default: not at all."
        ),
    ] = "",
    ratio: _Ratio = 0.01,
    patience: Annotated[
        float, typer.Option(help="End a window after this many seconds, however few its steps.")
    ] = 60.0,
    folder: _Folder = None,
    plot: output.Plot = None,
) -> output.Reply:
    """Measure what a checkpoint every few steps costs: none, ours, and the peers that are installed."""
    from everystep.bench.methods import LOGS, METHODS
    from everystep.bench.overhead import Settings, overhead
    from everystep.bench.plot import plot_overhead

    output.check_writable(plot)
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
    document = overhead(settings, output.say)
    if plot is not None:
        output.draw(plot, partial(plot_overhead, document))
    return output.Reply(document, lambda: [_title(document), _methods(document)])


@bench.command("replay")
def bench_replay(
    parameters: Annotated[
        int, typer.Option(help="Replay steps of a state with this many parameters.")
    ] = 50_000_000,
    threads: Annotated[
        int | None,
        typer.Option(help="Use this many threads. Default: as many as a shadow uses here."),
    ] = None,
) -> output.Reply:
    """Measure how fast the shadow replays steps: twins for k records in one pass, and torch's kernels."""
    from everystep.bench.replay_speed import replay_speed

    document = replay_speed(parameters, threads)
    title = f"{document['threads']} threads"
    return output.Reply(document, lambda: [title, _replay_rates(document)])


@bench.command("base")
def bench_base(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "sgd",
    steps: Annotated[
        int, typer.Option(help="Measure windows of this many steps before and after.")
    ] = 20,
    folder: _Folder = None,
) -> output.Reply:
    """Measure what a base costs that is taken while training goes on, its bits, and its way to the disk."""
    from everystep.bench.events import base_cost

    return _measured(base_cost(model, batch, optimizer, steps, folder))


@bench.command("log")
def bench_log(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "adamw-fused",
    steps: Annotated[int, typer.Option(help="Log this many steps, and replay them.")] = 100,
    compress: Annotated[
        str,
        typer.Option(
            help="Compress gradients: topk, randomk, int8, fp8, bf16, or - for not at all."
        ),
    ] = "topk",
    ratio: _Ratio = 0.01,
    folder: _Folder = None,
) -> output.Reply:
    """Measure how large a log is, how fast it is written, and what replaying it takes."""
    from everystep.bench.log_cost import log_cost

    method = "" if compress == "-" else compress
    return _measured(log_cost(model, batch, optimizer, steps, method, ratio, folder))


@bench.command("convergence")
def bench_convergence(
    steps: Annotated[int, typer.Option(help="Train this many steps, each time.")] = 300,
    plot: output.Plot = None,
) -> output.Reply:
    """Measure what compressing gradients costs in loss: the demo's GPT, dense and in every way compressed."""
    from everystep.bench.convergence import convergence
    from everystep.bench.plot import plot_losses

    output.check_writable(plot)
    document = convergence(steps, output.say)
    if plot is not None:
        output.draw(plot, partial(plot_losses, document))
    ends = document["loss_at_the_end"].items()
    return output.Reply(document, lambda: [output.pairs((n, f"{end:.4f}") for n, end in ends)])


@bench.command("pause")
def bench_pause(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "adamw-fused",
    seconds: Annotated[float, typer.Option(help="Stop the shadow for this many seconds.")] = 20.0,
    folder: _Folder = None,
) -> output.Reply:
    """Measure what training notices of a shadow that stands still (SIGSTOP), and when it is back."""
    from everystep.bench.events import pause_cost

    return _measured(pause_cost(model, batch, optimizer, seconds, folder))


@bench.command("resume")
def bench_resume(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "adamw-fused",
    folder: _Folder = None,
) -> output.Reply:
    """Measure how long it takes after SIGKILL until the next trainer has its state back."""
    from everystep.bench.events import resume_cost

    return _measured(resume_cost(model, batch, optimizer, folder))


@bench.command("tune")
def bench_tune(
    model: _Model = "gpt-tiny",
    batch: _Batch = 8,
    optimizer: _Optimizer = "adamw",
    steps: Annotated[int, typer.Option(help="Measure windows of this many steps.")] = 60,
    rounds: Annotated[
        int, typer.Option(help="Measure this many windows of each kind; an even number is fairer.")
    ] = 4,
    bases: Annotated[
        int, typer.Option(help="Write this many bases first, to see what they cost.")
    ] = 8,
    mtbf: Annotated[
        str,
        typer.Option(
            help="Plan for this mean time between failures; short, so that bases fit a window."
        ),
    ] = "1m",
    budget: Annotated[
        float, typer.Option(help="Let the plan slow training down by this many percent.")
    ] = 5.0,
    folder: _Folder = None,
) -> output.Reply:
    """Compare the overhead that the tuner predicts for its plan with the one that is measured."""
    from everystep.bench.tune_check import Settings, tune_check

    seconds = duration_seconds("mtbf", mtbf)
    settings = Settings(model, batch, optimizer, steps, rounds, bases, seconds, budget, folder)
    return _measured(tune_check(settings, output.say))


def _measured(document: dict[str, Any]) -> output.Reply:
    flat = [
        (f"{name} {inner}", value)
        for name, part in document.items()
        for inner, value in (part.items() if isinstance(part, dict) else [("", part)])
    ]
    return output.Reply(document, lambda: [output.pairs(flat)])


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
    return output.columns(names, rows)


def _rates(document: dict[str, Any]) -> Table:
    def rows(prefix: str, part: dict[str, Any]) -> Iterator[tuple[str, str]]:
        for name, value in part.items():
            if isinstance(value, dict):
                yield from rows(f"{prefix}{name} ", value)
            elif isinstance(value, float):
                yield f"{prefix}{name}", f"{value / 1e9:.2f} GB/s"
            else:
                yield f"{prefix}{name}", str(value)

    return output.pairs(rows("", document))


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
    return output.columns(names, rows)


def _title(document: dict[str, Any]) -> str:
    what = f"{document['model']}, batch {document['batch']}, every {document['every']}"
    return f"{what}, none spreads {100 * document['none_spread']:.1f} %"
