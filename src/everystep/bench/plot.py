"""Pictures of measurements, where matplotlib is installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from everystep.tune.model import Machine, Plan, objections, spread_steps, waste


def plot_overhead(document: dict[str, Any], path: Path) -> bool:
    """Iteration time of every method against none, on a log scale: peers lie far apart. False: there
    is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    methods = {k: v for k, v in document["methods"].items() if k != "none"}
    figure = Figure(figsize=(7, 0.6 + 0.45 * len(methods)), layout="constrained")
    axes = figure.subplots()
    names = list(methods)[::-1]
    ratios = [methods[name]["ratio"] for name in names]
    colours = ["tab:green" if name.startswith("everystep") else "tab:gray" for name in names]
    axes.barh(names, ratios, color=colours, left=0)
    axes.set_xscale("log")
    axes.set_xlim(0.9, max([*ratios, 1.1]) * 1.5)
    axes.axvline(1, color="black", linewidth=0.8)
    for place, ratio in enumerate(ratios):
        axes.text(ratio, place, f" {ratio:.3f}", va="center")
    every = "every step" if document["every"] == 1 else f"every {document['every']} steps"
    axes.set_xlabel("iteration time / no checkpointing")
    axes.set_title(f"{document['model']}, batch {document['batch']}, {every}, {document['device']}")
    figure.savefig(path, dpi=150)
    return True


def plot_losses(document: dict[str, Any], path: Path) -> bool:
    """Loss over steps, one line for each way to compress. False: there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, losses in document["losses"].items():
        window = max(1, len(losses) // 50)
        smooth = [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]
        dense = name == "dense"
        axes.plot(
            smooth, label=name, linewidth=2.5 if dense else 1, color="black" if dense else None
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


def plot_waste(machine: Machine, chosen: Plan, budget_percent: float, path: Path) -> bool:
    """Wasted time over both intervals; plans that cannot be taken are left out. False: no matplotlib."""
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ImportError:
        return False
    every = _around(chosen.base_every)
    batches = _around(max(1, chosen.batch))
    spread = spread_steps(machine, log=True)
    shares = [
        [_percent(machine, Plan(f, b, spread), budget_percent) for f in every] for b in batches
    ]
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    if any(share == share for row in shares for share in row):  # all NaN where no log fits
        colours = axes.pcolormesh(every, batches, shares, norm=LogNorm(), shading="nearest")
        figure.colorbar(colours, label="wasted time, percent of useful time")
    axes.plot([chosen.base_every], [max(1, chosen.batch)], "r*", markersize=14, label="chosen")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("steps from one base to the next")
    axes.set_ylabel("steps in one write of the log")
    named = f"{chosen.batch} steps a write" if chosen.batch else "no log"
    wasted = 100 * waste(machine, chosen).total
    axes.set_title(f"chosen: a base every {chosen.base_every} steps, {named}: {wasted:.3f} %")
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


def _around(value: int) -> list[int]:
    """Whole numbers from a hundredth of a value to a hundred times it."""
    return sorted({max(1, round(value * 10 ** (i / 20))) for i in range(-40, 41)})


def _percent(machine: Machine, plan: Plan, budget_percent: float) -> float:
    if objections(machine, plan, budget_percent):
        return math.nan
    return 100 * waste(machine, plan).total
