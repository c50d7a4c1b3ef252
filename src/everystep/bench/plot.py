"""Pictures of measurements, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
